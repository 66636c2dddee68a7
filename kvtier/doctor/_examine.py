"""The whole examination: every probe, every check, and nothing that one of them can break."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.config import (
    KvtierConfig,
    LocalStore,
    TierConfig,
    has_rank_paths,
    resolve_rank_paths,
)
from kvtier.doctor import _devices, _memory, _mounts, _store
from kvtier.doctor._finding import Finding, Verdict
from kvtier.doctor._machine import Machine
from kvtier.doctor._rates import MeasuredRates, check_rates, measure_tier_rates
from kvtier.doctor._scratch import direct_io_refusal
from kvtier.os.limits import huge_page_pool, memory_limits
from kvtier.tiers.base import StoreExamination
from kvtier.tiers.start import StartReport, examine_start
from kvtier.transfer import bounce_slots_for
from kvtier.units import approximate_size

__all__ = ["Examination", "examine", "examine_pages"]

_ONE_RANK: Final = Finding(
    "data parallelism",
    Verdict.NOTE,
    "each rank takes as much memory and disk; looked at is rank 0",
    "kvtier check --data-parallel-size N says whether there is room for N ranks",
)


@dataclass(frozen=True, slots=True)
class _Subject:
    """A tier with a directory on this machine.

    Attributes:
        config: The configuration.
        tier: The tier's section.
        store: Its directory.
        key: Key of the section.
        found: What a start would find there; None if that cannot be told.
    """

    config: KvtierConfig
    tier: TierConfig
    store: LocalStore
    key: str
    found: StoreExamination | None

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.tier.name


@dataclass(slots=True)
class Examination:
    """What the doctor found.

    Attributes:
        findings: In the order in which a person reads them.
        rates: Measured rates by the tier's name.
    """

    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, MeasuredRates] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings."""
        return max(
            (finding.verdict for finding in self.findings),
            key=lambda verdict: verdict.severity,
            default=Verdict.OK,
        )


def examine(
    config: KvtierConfig,
    *,
    seconds: float | None,
    identity: Mapping[str, str | int] | None = None,
    machine: Machine | None = None,
) -> Examination:
    """Look at everything that ``config`` needs of this machine; blocks.

    Files that it makes have no name and are gone when it returns.

    Args:
        config: The configuration.
        seconds: How long to measure reading, and writing, of each disk; None for not at all.
        identity: The known part of the engine's identity.
        machine: Where to look; this machine by default.
    """
    machine = machine or Machine()
    examination = Examination()
    of_ranks = has_rank_paths(config)
    config = resolve_rank_paths(config, rank=None)
    report = examine_start(config, identity or {})
    for number, tier in enumerate(config.tiers[1:], start=1):
        if store := tier.local_store():
            found = report.stores.get(number, [None])[0]
            subject = _Subject(config, tier, store, f"tiers[{number}]", found)
            _examine_store(subject, seconds, machine, examination)
        else:
            examination.findings.append(_elsewhere(tier))
    engine_runs = any(finding.check.endswith(": in use") for finding in examination.findings)
    for check, look in _host_checks(machine, config, engine_runs=engine_runs):
        _collect(check, look, examination)
    start = list(_check_start(config, report, examination.findings))
    if of_ranks:
        start.append(_ONE_RANK)
    examination.findings[:0] = start
    return examination


def examine_pages(config: KvtierConfig, *, machine: Machine | None = None) -> Finding:
    """Say in which pages the RAM tier comes.

    Args:
        config: The configuration.
        machine: Where to look; this machine by default.
    """
    pool = huge_page_pool((machine or Machine()).proc)
    return _memory.check_pages(_ram_bytes(config), pool, wanted=config.ram.huge_pages)


def _ram_bytes(config: KvtierConfig) -> int:
    """Return the memory of the RAM tier and of the relay, whose lanes are at least a piece."""
    piece = config.transfer.piece_bytes
    return config.ram.capacity_bytes + bounce_slots_for(config, piece) * piece


def _check_start(
    config: KvtierConfig, report: StartReport, known: Sequence[Finding]
) -> Iterator[Finding]:
    """Say what ``kvtier check`` says, without what ``known`` says already in more words."""
    tiers = ", ".join(
        f"{tier.name} of {approximate_size(tier.capacity_bytes)}" for tier in config.tiers
    )
    yield Finding("configuration", Verdict.OK, tiers)
    lines = [
        *((Verdict.PROBLEM, line) for line in report.problems),
        *((Verdict.WARNING, line) for line in report.warnings),
        *((Verdict.NOTE, line) for line in report.notes),
    ]
    problem = Verdict.PROBLEM
    known_keys = {finding.key for finding in known if finding.verdict is problem}
    for verdict, line in lines:
        match = re.search(r"tiers\[\d+\]\.\w+", line)
        key = match[0] if match else ""
        if verdict is not problem or key not in known_keys:
            found, _, remedy = line.partition("; ")
            yield Finding("configuration", verdict, found, remedy or "change it", key)


def _elsewhere(tier: TierConfig) -> Finding:
    """Report a tier that fills no directory of this machine."""
    found = f"kind {tier.kind} fills no directory of this machine: its medium is not examined"
    remedy = "examine it with the tools of the package that provides the kind"
    return Finding(f"{tier.name}: medium", Verdict.NOTE, found, remedy)


def _examine_store(
    subject: _Subject, seconds: float | None, machine: Machine, examination: Examination
) -> None:
    place = _place_of(subject.store.path)
    if place is None:
        return  # kvtier check says so, and there is nothing to look at
    for check, look in _store_checks(subject, place, machine):
        _collect(f"{subject.name}: {check}", look, examination)
    if seconds is not None:
        look = partial(_measure, subject, place, seconds, examination)
        _collect(f"{subject.name}: rates", look, examination)


def _place_of(path: Path) -> Path | None:
    """Return the directory in which a store at ``path`` has its room; None if there is none."""
    try:
        place = path if path.exists() or path.is_symlink() else path.parent
        return place if place.is_dir() else None
    except OSError:  # a directory above may not be entered
        return None


Look = Callable[[], Iterable[Finding]]


def _store_checks(
    subject: _Subject, place: Path, machine: Machine
) -> Iterator[tuple[str, Look]]:
    """Yield what to look at for one tier, and how it is called."""
    tier, path, key = subject.tier, subject.store.path, subject.key
    path_key, wanted = f"{key}.{subject.store.key}", subject.store.direct_io

    def mount() -> Iterator[Finding]:
        found = _mounts.find_mount(machine, place)
        exempt = _mounts.is_exempt_from_cow(place)
        yield from _mounts.check_mount(tier.name, found, exempt_from_cow=exempt)

    def directory() -> Iterator[Finding]:
        status = path.stat() if path.exists() else None
        intruder = _store.find_intruder(path)
        yield _store.check_directory(tier.name, path, status, intruder, path_key)

    def room() -> Iterator[Finding]:
        if subject.found is not None:
            found = _store.find_room(subject.found, place)
            capacity_bytes = tier.capacity_bytes
            yield from _store.check_room(tier.name, found, capacity_bytes, f"{key}.capacity")

    def direct_io() -> Iterator[Finding]:
        refusal = direct_io_refusal(place)
        if wanted is not None:
            yield _store.check_direct_io(tier.name, refusal, wanted, f"{key}.direct_io")

    def device() -> Iterator[Finding]:
        queues = _devices.find_queues(machine, _mounts.find_mount(machine, place))
        yield from _devices.check_queues(
            tier.name,
            queues,
            piece_nbytes=subject.config.transfer.piece_bytes,
            threads=_at_once(subject.config),
        )

    yield "file system", mount
    yield "directory", directory
    holders = () if subject.found is None else subject.found.holders
    yield "in use", lambda: _store.check_use(tier.name, holders)
    yield "free space", room
    yield "O_DIRECT", direct_io
    yield "device", device


def _measure(
    subject: _Subject, place: Path, seconds: float, examination: Examination
) -> Iterator[Finding]:
    rates = measure_tier_rates(
        place,
        piece_bytes=subject.config.transfer.piece_bytes,
        threads=_at_once(subject.config),
        seconds=seconds,
        direct_io="off" if subject.store.direct_io == "off" else "auto",
    )
    examination.rates[subject.name] = rates
    chunk_nbytes = _store.stored_chunk_nbytes(subject.store.path)
    yield from check_rates(subject.name, rates, chunk_nbytes)


def _host_checks(
    machine: Machine, config: KvtierConfig, *, engine_runs: bool
) -> Iterator[tuple[str, Look]]:
    """Yield what to look at for the RAM tier and the process, and how it is called."""
    ram, ram_bytes = config.ram, _ram_bytes(config)

    def memory() -> Iterator[Finding]:
        pool = huge_page_pool(machine.proc)
        if ram.huge_pages != "off" and _memory.comes_in_huge_pages(ram_bytes, pool):
            yield Finding("memory", Verdict.OK, "the RAM tier comes from reserved huge pages")
            return
        limits = memory_limits(machine.proc, machine.sys)
        yield _memory.check_memory(ram_bytes, limits, engine_runs=engine_runs)

    def pinning() -> Iterator[Finding]:
        locked_bytes = _memory.process_limits().locked_bytes
        gpus = len(_memory.find_gpus(machine))
        yield _memory.check_pinning(ram_bytes, locked_bytes, gpus=gpus)

    yield "memory", memory
    yield "memlock", pinning
    yield "huge pages", lambda: [examine_pages(config, machine=machine)]
    yield (
        "open files",
        lambda: [_memory.check_open_files(_memory.process_limits().open_files)],
    )
    yield (
        "/dev/shm",
        lambda: [_memory.check_shared_memory(_memory.shared_memory_nbytes(machine))],
    )


def _at_once(config: KvtierConfig) -> int:
    """Return how many pieces of one tier and direction may be under way."""
    transfer = config.transfer
    return min(transfer.io_threads, max(1, transfer.queue_limit_bytes // transfer.piece_bytes))


def _collect(check: str, look: Look, examination: Examination) -> None:
    """Add the findings of ``look``; if it fails, that is one."""
    findings = examination.findings
    try:
        findings.extend(look())
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "run it as the user that runs the engine; what cannot be seen is not judged"
        findings.append(
            Finding(check, Verdict.WARNING, f"could not be looked at: {words}", remedy)
        )
