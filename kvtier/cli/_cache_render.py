"""Formats the results of ``kvtier cache`` as text and for JSON.

Text shows times in UTC. JSON has seconds since the epoch, or null for an unknown time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from kvtier.cli._render import count_chunks, make_table, show_prose, show_table
from kvtier.keys import group_of, short_key
from kvtier.printable import printable
from kvtier.tiers.slab.index_reader import Entry, Totals
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.verify import Verification
from kvtier.units import approximate_duration, approximate_rate, approximate_size

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Check",
    "Explanation",
    "Listing",
    "Report",
    "compaction_document",
    "removal_document",
    "removal_words",
    "show_compactions",
    "show_explanations",
    "show_listings",
    "show_removal",
    "show_reports",
    "show_verifications",
    "verification_document",
]

_Chosen = Sequence[tuple[StoredNamespace, Sequence[Entry]]]

_REASONS: Final = {
    "evicted": "evicted: another chunk was written into its slot",
    "corrupt": "dropped by the engine: its bytes were not the bytes stored",
    "beyond": "its slot is past the end of slots.bin: a smaller tier, or a file cut short",
    "dropped": "removed by an operator",
    "reset": "gone with a reset of the cache",
    "after-reset": "dropped at a start: it was stored after a reset of the cache",
    "damaged": "lost with an index that could not be read",
}


@dataclass(slots=True)
class Report:
    """The result of ``stat`` for one namespace."""

    space: StoredNamespace
    slots: int
    holder: str | None = None
    disk_nbytes: int = 0
    index_nbytes: int = 0
    totals: Totals | None = None
    reset_at: int | None = None
    retained: int = 0
    retained_until: int = 0
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        slot_nbytes = self.space.layout.slot_nbytes
        totals = self.totals
        return {
            **_place(self.space),
            "layout": dict(self.space.layout.fingerprint.fields),
            "in_use_by": self.holder,
            "slot_nbytes": slot_nbytes,
            "slots": self.slots,
            "capacity_nbytes": self.slots * slot_nbytes,
            "disk_nbytes": self.disk_nbytes,
            "index_nbytes": self.index_nbytes,
            "chunks": totals and totals.chunks,
            "hits": totals and totals.hits,
            "oldest_at": (totals and totals.oldest_at) or None,
            "newest_at": (totals and totals.newest_at) or None,
            "removals": totals and totals.removals,
            "retained_chunks": self.retained,
            "retained_until": self.retained_until or None,
            **_reset_document(self.reset_at),
            "problem": self.problem or None,
        }


@dataclass(frozen=True, slots=True)
class Listing:
    """The result of ``ls`` for one namespace."""

    space: StoredNamespace
    entries: Sequence[Entry]
    chunks: int
    reset_at: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the listing as a dict for JSON."""
        listed = [_entry_document(entry) for entry in self.entries]
        return {
            **_place(self.space),
            "chunks": self.chunks,
            **_reset_document(self.reset_at),
            "listed": listed,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """The result of ``verify`` for one namespace."""

    space: StoredNamespace
    found: Verification
    reset_at: int | None


@dataclass(slots=True)
class Explanation:
    """The result of ``explain`` for one namespace."""

    space: StoredNamespace
    entry: Entry | None
    less_recent: int = 0
    reset_at: int | None = None
    short_key: str = ""
    left_at: int = 0
    reason: str = ""
    removal_log_begins_at: int = 0
    damaged_at: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict for JSON."""
        document = {**_place(self.space), "there": self.entry is not None}
        if self.entry:
            return {
                **document,
                **_entry_document(self.entry),
                "offset_nbytes": self.entry.slot * self.space.layout.slot_nbytes,
                "chunks_used_less_recently": self.less_recent,
                **_reset_document(self.reset_at),
            }
        return {
            **document,
            "short_key": self.short_key or None,
            "reason": self.reason or None,
            "left_at": self.left_at or None,
            "removal_log_begins_at": self.removal_log_begins_at or None,
            "index_damaged_at": self.damaged_at or None,
        }


def show_reports(console: Console, reports: Sequence[Report]) -> None:
    """Print the result of ``stat``."""
    for number, report in enumerate(reports):
        if number:
            console.print()
        _heading(console, report.space)
        _pairs(console, _report_lines(report))


def show_listings(console: Console, listings: Sequence[Listing]) -> None:
    """Print the result of ``ls``."""
    for number, listing in enumerate(listings):
        if number:
            console.print()
        _heading(console, listing.space)
        numbers = ("slot", "hits", "stored (UTC)", "last use (UTC)")
        table = make_table("key", numbers=numbers, narrow=True)
        for entry in listing.entries:
            table.add_row(
                short_key(entry.key),
                f"{entry.slot:,}",
                f"{entry.hits:,}",
                _time(entry.stored_at),
                _time(entry.used_at),
            )
        show_table(console, table)
        console.print(
            f"{len(listing.entries):,} of {count_chunks(listing.chunks)}", soft_wrap=True
        )
        _pairs(console, _reset_lines(listing.reset_at))


def show_verifications(console: Console, checks: Sequence[Check], limit: int) -> None:
    """Print the result of ``verify``: up to ``limit`` bad chunks per namespace, or all if 0."""
    for number, check in enumerate(checks):
        if number:
            console.print()
        found = check.found
        _heading(console, check.space)
        _pairs(console, _verification_lines(found) | _reset_lines(check.reset_at))
        if found.bad:
            table = make_table("bad chunk", "problem", numbers=("slot",), narrow=True)
            for bad in found.bad[: limit or None]:
                problem = "unreadable" if bad.unreadable else "not the bytes stored"
                table.add_row(short_key(bad.entry.key), problem, f"{bad.entry.slot:,}")
            show_table(console, table)
            hidden = len(found.bad) - len(found.bad[: limit or None])
            if hidden:
                console.print(f"and {hidden:,} more; --limit 0 lists all", soft_wrap=True)


def verification_document(check: Check, limit: int) -> dict[str, Any]:
    """Return the result of ``verify`` as a dict for JSON."""
    found = check.found
    return {
        **_place(check.space),
        "chunks": found.chunks,
        "good": _good(found),
        "changed": found.changed,
        "bad": len(found.bad),
        "bad_chunks": [
            {
                "key": bad.entry.key.hex(),
                "slot": bad.entry.slot,
                "problem": "unreadable" if bad.unreadable else "corrupt",
            }
            for bad in found.bad[: limit or None]
        ],
        "nbytes": found.nbytes,
        "seconds": round(found.seconds, 6),
        "bytes_per_s": round(_rate(found)),
        **_reset_document(check.reset_at),
    }


def show_explanations(console: Console, key: str, answers: Sequence[Explanation]) -> None:
    """Print the result of ``explain``."""
    for number, answer in enumerate(answers):
        if number:
            console.print()
        shown = answer.entry.key.hex() if answer.entry else answer.short_key or key
        console.print(Text(shown, style="bold"), soft_wrap=True)
        cache = {"cache": f"{answer.space.name}  {answer.space.layout.model}"}
        if answer.entry:
            _pairs(console, cache | _entry_lines(answer, answer.entry))
        else:
            _pairs(console, cache | _absence_lines(answer))


def show_pairs(console: Console, title: str, lines: Mapping[str, str]) -> None:
    """Print a title, then one line for each label and its text."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    _pairs(console, lines)


def removal_words(chosen: _Chosen) -> str:
    """Return a text with the number and the total size of the chunks to remove."""
    chunks = sum(len(entries) for _, entries in chosen)
    nbytes = sum(len(entries) * space.layout.slot_nbytes for space, entries in chosen)
    return f"{count_chunks(chunks)} ({approximate_size(nbytes)})"


def show_removal(console: Console, chosen: _Chosen) -> None:
    """Print the number and the total size of the removed chunks."""
    for space, entries in chosen:
        if entries:
            words = removal_words([(space, entries)])
            console.print(Text(f"{space.name}: {words}"), soft_wrap=True)
    console.print(Text(f"removed {removal_words(chosen)}"), soft_wrap=True)


def removal_document(chosen: _Chosen) -> dict[str, Any]:
    """Return the removed chunks as a dict for JSON."""
    return {
        "namespaces": [
            {
                **_place(space),
                "chunks": len(entries),
                "nbytes": len(entries) * space.layout.slot_nbytes,
                "keys": [entry.key.hex() for entry in entries],
            }
            for space, entries in chosen
        ],
    }


def show_compactions(
    console: Console, done: Sequence[tuple[StoredNamespace, tuple[int, int]]]
) -> None:
    """Print the size of each index before and after its compaction."""
    table = make_table("namespace", "model", numbers=("before", "after"), narrow=True)
    for space, nbytes in done:
        sizes = map(approximate_size, nbytes)
        table.add_row(space.name, printable(space.layout.model), *sizes)
    show_table(console, table)


def compaction_document(space: StoredNamespace, nbytes: tuple[int, int]) -> dict[str, Any]:
    """Return the size of an index before and after its compaction, as a dict for JSON."""
    before_nbytes, after_nbytes = nbytes
    return {
        **_place(space),
        "before_nbytes": before_nbytes,
        "after_nbytes": after_nbytes,
    }


def _report_lines(report: Report) -> dict[str, str]:
    slot_nbytes = report.space.layout.slot_nbytes
    lines = {
        "in use by": report.holder or "nobody",
        "capacity": f"{approximate_size(report.slots * slot_nbytes)}, {report.slots:,} slots "
        f"of {approximate_size(slot_nbytes)}",
    }
    totals = report.totals
    if totals is not None:
        share = f" ({totals.chunks / report.slots:.0%})" if report.slots else ""
        used = f"{approximate_size(totals.chunks * slot_nbytes)}, {count_chunks(totals.chunks)}"
        lines["used"] = used + share
    index = approximate_size(report.index_nbytes)
    lines["on disk"] = f"{approximate_size(report.disk_nbytes)}, of which the index {index}"
    if totals is not None:
        if totals.newest_at:
            lines["stored"] = f"{_time(totals.oldest_at)} to {_time(totals.newest_at)} UTC"
        lines["hits"] = f"{totals.hits:,} of the chunks there now"
        counts = (f"{count:,} {reason}" for reason, count in sorted(totals.removals.items()))
        lines["removed lately"] = ", ".join(counts) or "nothing"
    if report.retained:
        until = _time(report.retained_until)
        lines["retained"] = f"{count_chunks(report.retained)}, until {until} UTC at the latest"
    lines |= _reset_lines(report.reset_at)
    if report.problem:
        lines["problem"] = report.problem
    fields = sorted(report.space.layout.fingerprint.fields.items())
    lines["layout"] = ", ".join(f"{name}={value}" for name, value in fields)
    return lines


def _verification_lines(found: Verification) -> dict[str, str]:
    rate = approximate_rate(_rate(found))
    lines = {
        "read": f"{approximate_size(found.nbytes)} in {approximate_duration(found.seconds)}, "
        f"{rate}",
        "good": count_chunks(_good(found)),
        "bad": count_chunks(len(found.bad)),
    }
    if found.changed:
        lines["changed"] = f"{count_chunks(found.changed)}, by the engine meanwhile"
    return lines


def _entry_lines(answer: Explanation, entry: Entry) -> dict[str, str]:
    offset = f"{entry.slot * answer.space.layout.slot_nbytes:,}"
    used = f"{entry.hits:,} times" if entry.hits != 1 else "once"
    if entry.hits:
        used += f", last at {_time(entry.used_at)} UTC"
    return {
        "group": str(group_of(entry.key)),
        "where": f"slot {entry.slot:,}, byte {offset} of {answer.space.directory}/slots.bin",
        "stored": f"{_time(entry.stored_at)} UTC" if entry.stored_at else "unknown",
        "loaded": used if entry.hits else "never",
        "eviction": f"{count_chunks(answer.less_recent)} were used less recently",
        **_reset_lines(answer.reset_at),
    }


def _absence_lines(answer: Explanation) -> dict[str, str]:
    if answer.reason:
        return {
            "gone": _REASONS.get(answer.reason, answer.reason),
            "since": f"{_time(answer.left_at)} UTC",
        }
    lines = {"gone": "never stored, or removed before the log begins"}
    if answer.removal_log_begins_at:
        lines["removal log"] = f"begins at {_time(answer.removal_log_begins_at)} UTC"
    if answer.damaged_at:
        lines["note"] = (
            f"at {_time(answer.damaged_at)} UTC an index that could not be read was set aside; "
            "what it held is not known"
        )
    return lines


def _reset_lines(reset_at: int | None) -> dict[str, str]:
    if reset_at is None:
        return {}
    when = f"at {_time(reset_at)} UTC; " if reset_at else ""
    return {"reset": f"{when}the next start drops chunks stored since the reset"}


def _reset_document(reset_at: int | None) -> dict[str, Any]:
    return {"was_reset": reset_at is not None, "reset_at": reset_at or None}


def _entry_document(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key.hex(),
        "group": group_of(entry.key),
        "slot": entry.slot,
        "hits": entry.hits,
        "stored_at": entry.stored_at or None,
        "used_at": entry.used_at or None,
        "last_use": entry.last_use,
    }


def _place(space: StoredNamespace) -> dict[str, str]:
    return {
        "namespace": space.name,
        "directory": str(space.directory),
        "model": space.layout.model,
    }


def _good(found: Verification) -> int:
    return found.chunks - found.changed - len(found.bad)


def _rate(found: Verification) -> float:
    return found.nbytes / found.seconds if found.seconds else 0.0


def _time(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else "unknown"


def _heading(console: Console, space: StoredNamespace) -> None:
    heading = printable(f"{space.name}  {space.layout.model}")
    console.print(Text(heading, style="bold"), soft_wrap=True)


def _pairs(console: Console, lines: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in lines.items():
        table.add_row(name, Text(printable(value)))
    show_prose(console, table)
