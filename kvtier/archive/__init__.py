"""Archives: the chunks of a store, to carry to other machines.

::

    <archive>/manifest.json                the parts that there must be; written last
    <archive>/5f0c1d2e3a4b5c6d.kvtier      a part: keys, checksums, and the slots of some chunks
    ...

An archive is a directory, or a prefix of a bucket. It has parts of some 16 MiB instead of one
long file, because a part is the unit of everything:

* **Resuming.** A part is there as a whole or not at all. An interrupted export or merge finds
  the parts that it wrote, and writes the others. Object stores cannot resume a long upload.
* **Memory.** Threads handle a part each, so memory does not depend on the size of the archive.
* **Damage.** A part is named by the digest of its header, and the header has the checksum of
  every slot. A flipped bit, a part cut short or a missing part costs the chunks that it hits.

A slot has the same bytes in an archive as in a store. So engines of another number of ranks can
read it where they could read the store: where the fingerprint says ``ranks: any``.

An archive has no signature. Whoever can write it decides what the engines answer that import
it, as with a store.
"""

from __future__ import annotations

from kvtier.archive.exporting import Exported, export_chunks
from kvtier.archive.importing import Imported, import_chunks
from kvtier.archive.locations import Location, has_archive, open_location
from kvtier.archive.merging import Merged, merge_archives
from kvtier.archive.reading import Archive, Damage, open_archive, verify_archive
from kvtier.archive.target import namespace_for

__all__ = [
    "Archive",
    "Damage",
    "Exported",
    "Imported",
    "Location",
    "Merged",
    "export_chunks",
    "has_archive",
    "import_chunks",
    "merge_archives",
    "namespace_for",
    "open_archive",
    "open_location",
    "verify_archive",
]
