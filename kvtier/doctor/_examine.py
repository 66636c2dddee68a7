"""All checks of an examination, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvtier.config import KvtierConfig, LocalStore, TierConfig, resolve_rank_paths
from kvtier.doctor import _devices, _file, _memory, _mounts, _stores
from kvtier.doctor._findings import Examination, Finding, Status
from kvtier.os.limits import huge_page_pool, memory_limits

__all__ = ["examine", "examine_existing_stores"]


def examine(
    config: KvtierConfig,
    identity: Mapping[str, str | int] | None = None,
    *,
    ranks: int = 1,
    measure_s: float | None = None,
    machine: _memory.Machine | None = None,
) -> Examination:
    """Examine everything that a start with ``config`` needs on this machine; blocks.

    Args:
        config: The configuration as read from its file.
        identity: The known part of the engine's identity.
        ranks: Data-parallel ranks that run on this machine.
        measure_s: Seconds to read, and to write, each disk. None measures and writes nothing.
        machine: Where the kernel's files are.

    Raises:
        ConfigError: The ranks would share a path.
    """
    numbers = range(ranks) if ranks > 1 else (None,)
    engines = [resolve_rank_paths(config, rank=number) for number in numbers]
    stores = _stores.StoreExaminer(config, identity or {})
    examiner = _Examiner(
        config, engines, stores, measure_s, machine or _memory.Machine(), Examination()
    )
    examiner.run()
    return _with_places(config, examiner.examination)


def examine_existing_stores(
    config: KvtierConfig, identity: Mapping[str, str | int]
) -> Examination:
    """Examine only stores that exist on this machine; the engine may run elsewhere."""
    examination = Examination()
    examiner = _stores.StoreExaminer(config, identity)
    for number, tier in enumerate(resolve_rank_paths(config, rank=None).tiers):
        store = tier.local_store()
        if store and _stores.store_place(store.path) == store.path:
            examination.findings.extend(examiner.examine(number, [tier]))
    return _with_places(config, examination)


def _with_places(config: KvtierConfig, examination: Examination) -> Examination:
    findings = [
        replace(finding, place=config.origin.locate(finding.key)) if finding.key else finding
        for finding in examination.findings
    ]
    return Examination(findings, examination.rates)


@dataclass(frozen=True, slots=True)
class _Examiner:
    """Runs all checks; a check that raises becomes a finding."""

    config: KvtierConfig
    engines: Sequence[KvtierConfig]
    stores: _stores.StoreExaminer
    measure_s: float | None
    machine: _memory.Machine
    examination: Examination

    def run(self) -> None:
        config, first = self.config, self.engines[0]
        self._add("configuration", lambda: _file.check_values(config))
        self._add("configuration", lambda: _file.check_classes(config))
        self._add("data parallelism", lambda: _file.check_ranks(config, len(self.engines)))
        for number, tier in enumerate(first.tiers):
            remarks = partial(_file.check_remarks, number, tier)
            self._add(f"{tier.name}: options", remarks)
            if number > 0:
                self._examine_tier(number, tier)
        records = [each.trace.record for each in self.engines if each.trace.record]
        if records:
            look = partial(_stores.check_directories, "recording", "trace.record", records)
            self._add("recording", look)
        self._examine_memory(first)

    def _add(self, check: str, look: Callable[[], Iterable[Finding]]) -> bool:
        """Add the findings of ``look``; return False if one is a PROBLEM."""
        found: list[Finding] = []
        try:
            found.extend(look())
        except Exception as error:  # noqa: BLE001 - the other checks go on
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            reason = f"could not be examined: {words}"
            remedy = "run this as the user that runs the engine"
            found.append(Finding(check, Status.WARNING, reason, remedy))
        self.examination.findings.extend(found)
        return all(finding.status is not Status.PROBLEM for finding in found)

    def _examine_tier(self, number: int, tier: TierConfig) -> None:
        store = tier.local_store()
        if store is None:
            reason = f"kind {tier.kind} fills no directory of this machine: not examined"
            remedy = "use the tools of the package that provides it"
            finding = Finding(f"{tier.name}: medium", Status.NOTE, reason, remedy)
            self.examination.findings.append(finding)
            return
        sections = [engine.tiers[number] for engine in self.engines]
        paths = [each.path for section in sections if (each := section.local_store())]
        name, key = f"{tier.name}: directory", f"tiers[{number}].{store.key}"
        usable = self._add(name, lambda: _stores.check_directories(name, key, paths))
        place = _stores.store_place(store.path)
        if not usable or place is None:
            return
        look = partial(self.stores.examine, number, sections)
        usable = self._add(f"{tier.name}: cache", look)
        self._add(f"{tier.name}: file system", partial(self._check_mount, tier, place))
        self._add(f"{tier.name}: device", partial(self._check_device, tier, place))
        if usable and self.measure_s is not None:
            look = partial(self._measure, number, tier.name, store, place, self.measure_s)
            self._add(f"{tier.name}: rates", look)

    def _check_mount(self, tier: TierConfig, place: Path) -> Iterator[Finding]:
        mount = _mounts.find_mount(self.machine, place)
        exempt = _mounts.is_exempt_from_cow(place)
        yield _mounts.check_mount(tier.name, mount, exempt_from_cow=exempt)

    def _check_device(self, tier: TierConfig, place: Path) -> Iterator[Finding]:
        mount = _mounts.find_mount(self.machine, place)
        queues = _devices.find_queues(self.machine, mount)
        yield from _devices.check_queues(
            tier.name,
            queues,
            piece_nbytes=self.config.transfer.piece_bytes,
            threads=self._concurrent_pieces(),
        )

    def _measure(
        self, number: int, name: str, store: LocalStore, place: Path, seconds: float
    ) -> Iterator[Finding]:
        from kvtier.doctor import rates  # noqa: PLC0415 - `kvtier check` does without it

        if store.direct_io is not None:
            key = f"tiers[{number}].direct_io"
            yield rates.check_direct_io(name, place, store.direct_io, key)
        measured = rates.measure_tier_rates(
            place,
            piece_bytes=self.config.transfer.piece_bytes,
            threads=self._concurrent_pieces(),
            seconds=seconds,
            direct_io="off" if store.direct_io == "off" else "auto",
        )
        self.examination.rates[name] = measured
        yield from rates.check_rates(name, measured, rates.stored_chunk_nbytes(store.path))

    def _concurrent_pieces(self) -> int:
        """Return how many pieces one tier moves at once in one direction."""
        transfer = self.config.transfer
        queued = max(1, transfer.queue_limit_bytes // transfer.piece_bytes)
        return min(transfer.io_threads, queued)

    def _examine_memory(self, config: KvtierConfig) -> None:
        machine, ram = self.machine, config.ram
        ram_nbytes = (ram.capacity_bytes + _bounce_nbytes(config)) * len(self.engines)

        def check() -> Iterator[Finding]:
            pool = huge_page_pool(machine.proc)
            yield _memory.check_huge_pages(ram_nbytes, pool, mode=ram.huge_pages)
            if ram.huge_pages != "off" and pool.holds(ram_nbytes + pool.page_nbytes):
                return  # reserved pages do not count as free memory
            limits = memory_limits(machine.proc, machine.sys)
            engine_runs = self.stores.engine_runs
            yield _memory.check_memory(ram_nbytes, limits, engine_runs=engine_runs)

        self._add("memory", check)
        gpus = machine.count_gpus()
        self._add("memlock", lambda: [_memory.check_locking(ram_nbytes, gpus=gpus)])


def _bounce_nbytes(config: KvtierConfig) -> int:
    """Return the bytes of the bounce buffer between slower tiers."""
    if len(config.tiers) <= 2:
        return 0
    from kvtier.transfer import bounce_slots_for  # noqa: PLC0415 - imports asyncio

    piece_nbytes = config.transfer.piece_bytes
    return bounce_slots_for(config, piece_nbytes) * piece_nbytes
