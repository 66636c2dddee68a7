"""Archives: files with chunks of a cache, to copy the cache to other machines.

::

    <archive>/manifest.json                names and sizes of all parts; written last
    <archive>/5f0c1d2e3a4b5c6d.kvtier      a part: keys, checksums, and the slots of some chunks
    ...

An archive is a directory, or a prefix of a bucket. An archive has parts of about 16 MiB instead
of one long file, for three reasons:

* **Resuming.** A part exists completely or not at all. After an interruption, a repeated export
  or merge finds the written parts and writes only the others. Object stores cannot resume a
  long upload.
* **Memory.** Each thread handles one part at a time, so an archive of any size needs bounded
  memory.
* **Damage.** The name of a part is the digest of its header, and the header has the checksum of
  every slot. So damage affects only the chunks in the damaged record or part.

A slot has the same bytes in an archive as in a cache. An engine with another number of ranks
can use the slot if the fingerprint has ``ranks: any``.

An archive has no signature. As with a cache, every user who can write to an archive can change
the answers of engines that use the archive's chunks.
"""

from __future__ import annotations

from kvtier.archive.exporting import Exported, export_chunks
from kvtier.archive.importing import Imported, import_chunks
from kvtier.archive.locations import Location, has_archive
from kvtier.archive.merging import Merged, merge_archives
from kvtier.archive.objects import open_location
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
