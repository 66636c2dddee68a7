"""Runs all checks of ``kvtier check`` and ``kvtier doctor``, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.config import (
    TIERS,
    KvtierConfig,
    LocalDirectory,
    SharedTierConfig,
    TierConfig,
    has_rank_paths,
    resolve_rank_paths,
)
from kvtier.doctor import _machine, _stores
from kvtier.doctor._findings import Finding, Status
from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.os.limits import huge_page_pool, memory_limits
from kvtier.policies.registry import ADMISSIONS, EVICTIONS, PLACEMENTS
from kvtier.units import approximate_size

if TYPE_CHECKING:
    from kvtier.doctor.rates import MeasuredRates
    from kvtier.doctor.shared_rates import SharedRates

__all__ = ["Examination", "examine", "examine_existing_caches"]

_CHECK: Final = "configuration"
_SLOWER_TIER_KEYS: Final = (
    "write",
    "write_after",
    "promote",
    "admit",
    "write_budget_per_day_bytes",
)
"""Keys of ``placement`` that need a slower tier."""


@dataclass(slots=True)
class Examination:
    """The findings of all checks, and the measured rates.

    Attributes:
        findings: The findings, in the order of the report.
        rates: Measured rates by the name of the tier; empty without a measurement.
    """

    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, MeasuredRates | SharedRates] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Return the worst status of all findings."""
        statuses = (finding.status for finding in self.findings)
        return max(statuses, key=lambda status: status.severity, default=Status.OK)

    def lines(self, status: Status) -> list[str]:
        """Return the findings with ``status``, one line each."""
        return [finding.line() for finding in self.findings if finding.status is status]

    def as_dict(self) -> dict[str, Any]:
        """Return the examination as a dict for JSON."""
        return {
            "status": self.status.value,
            "findings": [asdict(finding) for finding in self.findings],
            "measured": {name: asdict(rates) for name, rates in self.rates.items()},
        }


def examine(
    config: KvtierConfig,
    identity: Mapping[str, str | int] | None = None,
    *,
    ranks: int = 1,
    measure_s: float | None = None,
    machine: _machine.Machine | None = None,
) -> Examination:
    """Check whether kvtier can start with ``config`` on this machine. This function blocks.

    Args:
        config: The configuration as read from its file.
        identity: The known fields of the engine's identity.
        ranks: Number of data-parallel ranks on this machine.
        measure_s: Seconds to read and seconds to write on each disk; None to measure nothing.
        machine: Paths of the kernel's file systems.

    Raises:
        ConfigError: The ranks would share a path.
    """
    numbers = range(ranks) if ranks > 1 else (None,)
    engines = [resolve_rank_paths(config, rank=number) for number in numbers]
    stores = _stores.DirectoryExaminer(config, identity or {})
    examiner = _Examiner(config, engines, stores, measure_s, machine or _machine.Machine())
    examiner.run()
    return _with_places(config, examiner.examination)


def examine_existing_caches(
    config: KvtierConfig, identity: Mapping[str, str | int]
) -> Examination:
    """Examine only the caches that exist on this machine. The engine may run elsewhere."""
    examination = Examination()
    examiner = _stores.DirectoryExaminer(config, identity)
    for number, tier in enumerate(resolve_rank_paths(config, rank=None).tiers):
        store = tier.local_directory()
        if store and _stores.existing_directory(store.path) == store.path:
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
    """Runs all checks. If a check raises an exception, a finding reports it."""

    config: KvtierConfig
    engines: Sequence[KvtierConfig]
    stores: _stores.DirectoryExaminer
    measure_s: float | None
    machine: _machine.Machine
    examination: Examination = field(default_factory=Examination)

    def run(self) -> None:
        config, first = self.config, self.engines[0]
        self._add("configuration", lambda: _check_values(config))
        self._add("configuration", lambda: _check_classes(config))
        self._add("data parallelism", lambda: _check_ranks(config, len(self.engines)))
        for number, tier in enumerate(first.tiers):
            self._add(f"{tier.name}: options", partial(_check_remarks, number, tier))
            if number > 0:
                self._examine_tier(number, tier)
        records = [each.trace.record for each in self.engines if each.trace.record]
        if records:
            look = partial(_stores.check_directories, "recording", "trace.record", records)
            self._add("recording", look)
        self._examine_memory(first)

    def _add(self, check: str, look: Callable[[], Iterable[Finding]]) -> bool:
        """Run ``look`` and add its findings; return False if one of them is a PROBLEM."""
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
        store = tier.local_directory()
        if isinstance(tier, SharedTierConfig):
            if self.measure_s is not None:
                look = partial(self._measure_shared, tier, self.measure_s)
                self._add(f"{tier.name}: rates", look)
            return
        if store is None:
            reason = f"kind {tier.kind} fills no directory of this machine: not examined"
            remedy = "use the tools of the package that provides it"
            finding = Finding(f"{tier.name}: medium", Status.NOTE, reason, remedy)
            self.examination.findings.append(finding)
            return
        sections = [engine.tiers[number] for engine in self.engines]
        paths = [each.path for section in sections if (each := section.local_directory())]
        name, key = f"{tier.name}: directory", f"tiers[{number}].{store.key}"
        usable = self._add(name, lambda: _stores.check_directories(name, key, paths))
        directories = list(filter(None, map(_stores.existing_directory, paths)))
        if not usable or not directories:
            return
        look = partial(self.stores.examine, number, sections)
        usable = self._add(f"{tier.name}: cache", look)
        self._add(f"{tier.name}: file system", partial(self._check_disk, tier, directories))
        if usable and self.measure_s is not None:
            look = partial(
                self._measure, number, tier.name, store, directories[0], self.measure_s
            )
            self._add(f"{tier.name}: rates", look)

    def _check_disk(self, tier: TierConfig, directories: Sequence[Path]) -> Iterator[Finding]:
        directory = directories[0]
        mount = _machine.find_mount(self.machine, directory)
        exempt = _machine.is_exempt_from_cow(directory)
        yield _machine.check_mount(tier.name, mount, exempt_from_cow=exempt)
        queues = _machine.find_queues(self.machine, mount)
        piece_nbytes = self.config.transfer.piece_bytes
        yield from _machine.check_queues(tier.name, queues, piece_nbytes=piece_nbytes)
        if any(each.stat().st_dev != directory.stat().st_dev for each in directories):
            reason = "other ranks use other file systems, which are not examined or measured"
            remedy = "run this with the path of each"
            yield Finding(f"{tier.name}: other ranks", Status.NOTE, reason, remedy)

    def _measure(
        self, number: int, name: str, store: LocalDirectory, directory: Path, seconds: float
    ) -> Iterator[Finding]:
        from kvtier.doctor import rates  # noqa: PLC0415 - `kvtier check` does without it

        if store.direct_io is not None:
            key = f"tiers[{number}].direct_io"
            yield rates.check_direct_io(name, directory, store.direct_io, key)
        measured = rates.measure_directory(self.config, store, seconds=seconds)
        self.examination.rates[name] = measured
        yield from rates.check_rates(name, measured)

    def _measure_shared(self, tier: SharedTierConfig, seconds: float) -> Iterator[Finding]:
        from kvtier.doctor import shared_rates  # noqa: PLC0415 - imports asyncio

        try:
            measured = shared_rates.measure_shared_tier(self.config, tier, seconds=seconds)
        except TierUnavailableError as error:
            remedy = "start the service, or correct its address; engines start without it"
            yield Finding(f"{tier.name}: service", Status.WARNING, str(error), remedy)
            return
        except shared_rates.TierFullError as error:
            remedy = "give it more room; until then engines keep new chunks in faster tiers"
            yield Finding(f"{tier.name}: room", Status.WARNING, str(error), remedy)
            return
        self.examination.rates[tier.name] = measured
        yield from shared_rates.check_shared_rates(tier, measured)

    def _examine_memory(self, config: KvtierConfig) -> None:
        machine, ram = self.machine, config.ram
        ram_nbytes = (ram.capacity_bytes + _bounce_nbytes(config)) * len(self.engines)

        def check() -> Iterator[Finding]:
            pool = huge_page_pool(machine.proc)
            yield _machine.check_huge_pages(ram_nbytes, pool, mode=ram.huge_pages)
            if ram.huge_pages != "off" and pool.holds(ram_nbytes + pool.page_nbytes):
                # Reserved pages do not count as free memory.
                yield Finding("memory", Status.OK, "the reserved huge pages hold the RAM tier")
                return
            limits = memory_limits(machine.proc, machine.sys)
            engine_runs = self.stores.engine_runs
            yield _machine.check_memory(ram_nbytes, limits, engine_runs=engine_runs)

        self._add("memory", check)


def _bounce_nbytes(config: KvtierConfig) -> int:
    """Return the size of the bounce buffer between slower tiers, in bytes."""
    if len(config.tiers) <= 2:
        return 0
    from kvtier.transfer import bounce_slots_for  # noqa: PLC0415 - imports asyncio

    piece_nbytes = config.transfer.piece_bytes
    return bounce_slots_for(config, piece_nbytes) * piece_nbytes


def _check_values(config: KvtierConfig) -> Iterator[Finding]:
    """Yield a finding that lists the tiers, and one for each setting of little or no use."""
    sizes = (f"{tier.name} of {approximate_size(tier.capacity_bytes)}" for tier in config.tiers)
    yield Finding(_CHECK, Status.OK, ", ".join(sizes))
    for number, (faster, slower) in enumerate(pairwise(config.tiers), start=1):
        if slower.capacity_bytes <= faster.capacity_bytes:
            reason = f"no larger than the faster tier {faster.name}, so of little use"
            remedy = "give the slower tier the larger capacity"
            key = f"tiers[{number}].capacity"
            yield Finding(_CHECK, Status.WARNING, reason, remedy, key)
    placement, fields = config.placement, type(config.placement).model_fields
    for name in _SLOWER_TIER_KEYS if len(config.tiers) == 1 else ():
        if getattr(placement, name) != fields[name].default:
            key = f"placement.{fields[name].serialization_alias or name}"
            reason, remedy = "no effect without a slower tier", "remove it or add a tier"
            yield Finding(_CHECK, Status.WARNING, reason, remedy, key)


def _check_classes(config: KvtierConfig) -> Iterator[Finding]:
    """Check that policies and tiers from other packages can be imported and are complete."""
    # Importing the manager takes 0.2 s. Built-in policies and tiers always load.
    if _has_custom_policies(config):
        from kvtier.build import check_policies  # noqa: PLC0415

        yield from _problems_of(check_policies, config)
    if not all(tier.kind in TIERS.built_in for tier in config.tiers):
        from kvtier.tiers.registry import check_tiers  # noqa: PLC0415

        yield from _problems_of(check_tiers, config)


def _problems_of(
    check: Callable[[KvtierConfig], None], config: KvtierConfig
) -> Iterator[Finding]:
    try:
        check(config)
    except ConfigError as error:
        for line in str(error).splitlines():
            reason, _, remedy = line.rpartition("; ")
            yield Finding(_CHECK, Status.PROBLEM, reason or line, remedy)


def _has_custom_policies(config: KvtierConfig) -> bool:
    """Return whether ``config`` names a policy of another package."""
    rules = config.placement
    evictions = {*config.shadow, *(tier.eviction for tier in config.tiers)}
    return not (
        evictions <= EVICTIONS.built_in.keys()
        and rules.policy in PLACEMENTS.built_in
        and rules.admit in ADMISSIONS.built_in
    )


def _check_remarks(number: int, tier: TierConfig) -> Iterator[Finding]:
    """Yield the warnings that a tier's ``remarks`` method returns."""
    check, key = f"{tier.name}: options", f"tiers[{number}]"
    try:
        for name, problem, remedy in tier.remarks():
            yield Finding(check, Status.WARNING, problem, remedy, f"{key}.{name}")
    except ConfigError as error:
        reason, _, remedy = str(error).rpartition("; ")
        yield Finding(check, Status.PROBLEM, reason or remedy, remedy, key)
    except Exception as error:  # noqa: BLE001 - a tier may be another package's code
        reason = f"the tier's remarks() failed: {error!r}"
        yield Finding(check, Status.PROBLEM, reason, "repair the tier's class", key)


def _check_ranks(config: KvtierConfig, ranks: int) -> Iterator[Finding]:
    """Report the memory and disk that all data-parallel ranks need together."""
    check = "data parallelism"
    if ranks > 1:
        ram_nbytes, *others = (tier.capacity_bytes * ranks for tier in config.tiers)
        sizes = f"{approximate_size(ram_nbytes)} of memory"
        if others:
            sizes += f" and {approximate_size(sum(others))} of slower tiers"
        yield Finding(check, Status.NOTE, f"{ranks} ranks need {sizes}")
    elif has_rank_paths(config):
        reason = "each rank needs all capacities; this examines one rank"
        remedy = "add --data-parallel-size N to examine N ranks"
        yield Finding(check, Status.NOTE, reason, remedy)
