"""Disks that fail, stall, rot and vanish below a real engine: it goes on, token for token.

The disk is a :class:`~tests.support.faulty_tier.FaultyTier` in the tier's own process. What it
does is compared with what the engine counted, cause by cause:

=========  ====================================================================================
injected   counted
=========  ====================================================================================
``fail``   ``kvtier_failed_chunks{cause=read}``, a chunk each
``rot``    ``kvtier_failed_chunks{cause=corrupt}`` and ``kvtier_corrupt_chunks``, a chunk each
``stall``  ``kvtier_expired_jobs``, a batch each, and ``kvtier_failed_chunks{cause=expired}``,
           all chunks of the batch; of reads and writes alike
=========  ====================================================================================
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.demo.runner import EngineProcess, run_engine
from tests.demo.scenario import Report, Scenario, Wave, WaveReport
from tests.integration.harness import CONVERSATIONS, Reference, Site, hit_tokens
from tests.integration.test_connector import ENTRY_POINTS, through
from tests.support.faulty_tier import DiskFault, FaultPlan, Injection, install

every_entry_point = pytest.mark.parametrize("entry_point", [*ENTRY_POINTS])

LOAD_TIMEOUT_S = 4.0
STALL_S = 5.5
PROMPTS = 20
PROMPTS_IN_RAM = 6
RAM_BLOCKS = 96
GPU_BLOCKS = 48
CONTEXT_TOKENS = 1024
NEVER = 1 << 30
LONG_S = 900.0

Phase = tuple[DiskFault, int]

BY_DAY = ((DiskFault.FAIL, 10), (DiskFault.ROT, 10), (DiskFault.STALL, 10))
BY_NIGHT = tuple((fault, one_in) for one_in in (100, 10, 2) for fault in DiskFault)


class FaultySite:
    """A site with a disk that fails on request.

    Args:
        site: Where.
        monkeypatch: Puts the tier kind on the path of the engine's process.
    """

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.plan = site.directory / "plan.json"
        self.ledger = site.directory / "ledger.jsonl"
        packages = site.directory / "packages"
        install(packages)
        monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)

    def scenario(
        self, waves: Sequence[Wave], *, entry_point: str, breaker_failures: int | None = NEVER
    ) -> Scenario:
        """Return a scenario with little memory over the faulty tier."""
        scenario = through(entry_point, little_memory(self.site, waves))
        assert scenario.config is not None
        settings = yaml.safe_load(scenario.config.read_text())
        settings["tiers"][1] |= {
            "kind": "faulty",
            "name": "nvme",
            "plan": str(self.plan),
            "ledger": str(self.ledger),
            "stall_s": STALL_S,
        }
        settings["transfer"] |= {
            "load_timeout": f"{LOAD_TIMEOUT_S}s",
            "breaker_backoff": "200ms",
            # A read that stalls keeps a thread, and none that is well shall wait for one.
            "io_threads": 64,
        }
        scenario.config.write_text(yaml.safe_dump(settings))
        return scenario.model_copy(update={"breaker_failures": breaker_failures})

    def faulty(self, wave: Wave, plan: FaultPlan) -> Wave:
        """Return ``wave``, sent to a disk that does as ``plan`` says."""
        return wave.model_copy(update={"files": {self.plan: plan.model_dump_json()}})

    def well(self, wave: Wave) -> Wave:
        """Return ``wave``, sent to a disk that is as good as well."""
        return self.faulty(wave, FaultPlan(name="well", fault=DiskFault.FAIL, one_in=NEVER))

    def injections(self, plan: str) -> list[Injection]:
        """Return what was done under the plan of that name."""
        if not self.ledger.exists():
            return []
        lines = self.ledger.read_text().splitlines()
        injections = [Injection.model_validate_json(line) for line in lines]
        return [injection for injection in injections if injection.plan == plan]


def little_memory(site: Site, waves: Sequence[Wave]) -> Scenario:
    """Return a scenario in which nearly all that is asked for again is on NVMe alone."""
    blocks = site.reference.footprint_blocks
    scenario = site.scenario(waves, ram_blocks=RAM_BLOCKS, nvme_blocks=blocks)
    size = {"gpu_blocks": GPU_BLOCKS, "context_tokens": CONTEXT_TOKENS}
    return scenario.model_copy(update=size)


@pytest.fixture
def faulty_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> FaultySite:
    return FaultySite(site, monkeypatch)


def name_of(phase: Phase) -> str:
    fault, one_in = phase
    return f"{fault} one in {one_in}"


def few(wave: Wave, prompts: int, **changes: object) -> Wave:
    """Return the first ``prompts`` prompts of ``wave``, four tokens each."""
    shorter = {"prompts": wave.prompts[:prompts], "max_tokens": 4}
    return wave.model_copy(update=shorter | changes)


def waves_of(faulty_site: FaultySite, phases: Sequence[Phase], prompts: int) -> list[Wave]:
    """Return a wave that fills the disk, one in each of ``phases``, and one in good health."""
    talk = few(faulty_site.site.reference.conversations[0], prompts)
    waves = [talk]
    for fault, one_in in phases:
        # A stall takes seconds, so there are fewer of them.
        wave = talk if fault is DiskFault.STALL else there_and_back(talk)
        plan = FaultPlan(name=name_of((fault, one_in)), fault=fault, one_in=one_in)
        waves.append(faulty_site.faulty(wave, plan))
    return [*waves, faulty_site.well(talk)]


def there_and_back(wave: Wave) -> Wave:
    """Return ``wave`` with each prompt asked twice, most of the others in between."""
    return wave.model_copy(update={"prompts": wave.prompts + wave.prompts[::-1]})


def counted(wave: WaveReport, counter: str, **labels: str) -> float:
    return Report(waves=(wave,)).count(counter, **labels)


def assert_counted_as_injected(wave: WaveReport, injections: Sequence[Injection]) -> None:
    chunks, batches = Counter[DiskFault](), Counter[DiskFault]()
    for injection in injections:
        chunks[injection.fault] += injection.chunks
        batches[injection.fault] += 1
    failed = {
        cause: counted(wave, "kvtier_failed_chunks", tier="nvme", cause=cause)
        for cause in ("read", "write", "corrupt", "expired", "refused")
    }
    assert failed == {
        "read": chunks[DiskFault.FAIL],
        "write": 0,
        "corrupt": chunks[DiskFault.ROT],
        "expired": chunks[DiskFault.STALL],
        "refused": 0,
    }
    assert counted(wave, "kvtier_corrupt_chunks", tier="nvme") == chunks[DiskFault.ROT]
    assert counted(wave, "kvtier_expired_jobs", tier="nvme") == batches[DiskFault.STALL]
    assert counted(wave, "kvtier_internal_errors") == 0


def assert_only_late_jobs_hold(report: Report, *, writes: bool = False) -> None:
    """A job past its deadline keeps its chunks until it ends; nothing else keeps any."""
    last = report.waves[-1].counters
    above, below = (last[f"kvtier_held_chunks{{tier={tier}}}"] for tier in ("ram", "nvme"))
    assert above == below, "each is held in both"
    assert last["kvtier_granted_chunks{}"] == 0
    # What a late write was to bring down is not down.
    assert last["kvtier_dirty_chunks{tier=ram}"] == (above if writes else 0)


def check_phases(
    faulty_site: FaultySite,
    entry_point: str,
    phases: Sequence[Phase],
    *,
    prompts: int,
    ranks: int = 1,
) -> None:
    site = faulty_site.site
    waves = waves_of(faulty_site, phases, prompts)
    scenario = faulty_site.scenario(waves, entry_point=entry_point).model_copy(
        update={"ranks": ranks}
    )
    with EngineProcess(scenario, site.directory, entry_point, timeout_s=LONG_S) as engine:
        report = engine.result()
    site.reference.assert_equal(report, waves=waves)
    assert not any(answer.failed for answer in report.answers())
    for phase, wave in zip(phases, report.waves[1:-1], strict=True):
        injections = faulty_site.injections(name_of(phase))
        assert injections, f"{name_of(phase)}: nothing was read"
        assert_counted_as_injected(wave, injections)
    for wave in (report.waves[0], report.waves[-1]):
        assert_counted_as_injected(wave, ())
    assert counted(report.waves[-1], "kvtier_hit_tokens", tier="nvme") > 0
    # Only who loads before the bytes are there can find that they do not come.
    assert ("Recovered from KV load failure" in site.log(entry_point)) == (
        entry_point == "direct"
    )
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()


def test_reads_that_fail_rot_and_stall_cost_no_request_and_are_counted(
    faulty_site: FaultySite,
) -> None:
    check_phases(faulty_site, "direct", BY_DAY, prompts=PROMPTS)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@every_entry_point
def test_one_read_in_a_hundred_in_ten_and_in_two_is_bad(
    entry_point: str, faulty_site: FaultySite
) -> None:
    check_phases(faulty_site, entry_point, BY_NIGHT, prompts=CONVERSATIONS)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_load_that_fails_in_two_ranks_is_computed_by_both(faulty_site: FaultySite) -> None:
    check_phases(faulty_site, "direct", BY_DAY, prompts=PROMPTS, ranks=2)


@pytest.mark.slow
@every_entry_point
def test_writes_that_stall_cost_no_request_and_are_counted(
    entry_point: str, faulty_site: FaultySite
) -> None:
    """What could not be written in time is in RAM only, and is held there until it is."""
    site = faulty_site.site
    talk = few(site.reference.conversations[0], PROMPTS)
    plan = FaultPlan(name="writes", fault=DiskFault.STALL, one_in=10, on="write")
    waves = [faulty_site.faulty(talk, plan), faulty_site.well(there_and_back(talk))]
    scenario = faulty_site.scenario(waves, entry_point=entry_point)
    assert scenario.config is not None
    settings = yaml.safe_load(scenario.config.read_text())
    settings["transfer"]["store_timeout"] = f"{LOAD_TIMEOUT_S}s"
    scenario.config.write_text(yaml.safe_dump(settings))
    report = run_engine(scenario, site.directory, entry_point)
    site.reference.assert_equal(report, waves=waves)
    assert not any(answer.failed for answer in report.answers())
    injections = faulty_site.injections("writes")
    assert injections, "nothing was written"
    expired = report.count("kvtier_failed_chunks", tier="nvme", cause="expired")
    assert expired == sum(injection.chunks for injection in injections)
    assert report.count("kvtier_expired_jobs", tier="nvme") == len(injections)
    assert counted(report.waves[-1], "kvtier_hit_tokens", tier="nvme") > 0
    assert report.count("kvtier_internal_errors") == 0
    assert_only_late_jobs_hold(report, writes=True)
    site.assert_nothing_held()


@pytest.mark.slow
@every_entry_point
def test_a_disk_that_fails_on_and_on_is_left_alone(
    entry_point: str, faulty_site: FaultySite
) -> None:
    """With the breaker as it is by default, and every read failing."""
    site, talk = faulty_site.site, faulty_site.site.reference.conversations[0]
    plan = FaultPlan(name="all", fault=DiskFault.FAIL, one_in=1)
    healthy = few(talk, PROMPTS)
    waves = [healthy, faulty_site.faulty(healthy, plan), faulty_site.well(healthy)]
    scenario = faulty_site.scenario(waves, entry_point=entry_point, breaker_failures=None)
    report = run_engine(scenario, site.directory, entry_point)
    site.reference.assert_equal(report, waves=waves)
    faulty = report.waves[1]
    injected = sum(injection.chunks for injection in faulty_site.injections("all"))
    assert injected > 0
    failed = counted(faulty, "kvtier_failed_chunks", tier="nvme", cause="read")
    assert failed == injected
    assert counted(faulty, "kvtier_hit_tokens", tier="nvme") == 0
    assert "nvme -> ram is out of service" in site.log(entry_point)
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()


@pytest.mark.slow
@pytest.mark.timeout(1000)
@every_entry_point
def test_every_other_read_stalls_and_all_but_the_deadline_is_as_by_default(
    entry_point: str, faulty_site: FaultySite
) -> None:
    """Reads that are well wait for threads that stall, and the breaker opens."""
    site = faulty_site.site
    talk = few(site.reference.conversations[0], PROMPTS)
    plan = FaultPlan(name="half", fault=DiskFault.STALL, one_in=2)
    waves = [talk, faulty_site.faulty(there_and_back(talk), plan), faulty_site.well(talk)]
    scenario = faulty_site.scenario(waves, entry_point=entry_point, breaker_failures=None)
    assert scenario.config is not None
    settings = yaml.safe_load(scenario.config.read_text())
    for key in ("breaker_backoff", "io_threads"):
        del settings["transfer"][key]
    scenario.config.write_text(yaml.safe_dump(settings))
    with EngineProcess(scenario, site.directory, entry_point, timeout_s=LONG_S) as engine:
        report = engine.result()
    site.reference.assert_equal(report, waves=waves)
    assert not any(answer.failed for answer in report.answers())
    assert faulty_site.injections("half"), "nothing was read"
    late = {
        cause: report.count("kvtier_failed_chunks", tier="nvme", cause=cause)
        for cause in ("expired", "refused")
    }
    assert late["expired"] + late["refused"] > 0
    assert report.count("kvtier_internal_errors") == 0
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()


@pytest.mark.slow
def test_if_a_failed_load_fails_its_request_other_requests_succeed(
    faulty_site: FaultySite,
) -> None:
    site, talk = (
        faulty_site.site,
        few(faulty_site.site.reference.conversations[0], CONVERSATIONS),
    )
    plan = FaultPlan(name="rot", fault=DiskFault.ROT, one_in=40)
    waves = [talk, faulty_site.faulty(talk, plan)]
    scenario = faulty_site.scenario(waves, entry_point="direct")
    scenario = scenario.model_copy(update={"load_failures": "fail"})
    report = run_engine(scenario, site.directory, "fail")
    expected = site.reference.answers
    answers = report.waves[1].answers
    failed = [answer for answer in answers if answer.failed]
    assert 0 < len(failed) < len(answers)
    assert site.log("fail").count(": not loaded: ") == len(failed)
    for answer in (*report.waves[0].answers, *answers):
        if not answer.failed:
            assert answer.tokens == expected[answer.prompt][:4]
    assert_counted_as_injected(report.waves[1], faulty_site.injections("rot"))
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()


@pytest.mark.slow
@every_entry_point
@pytest.mark.parametrize("host_dies", [False, True], ids=["removed", "removed-and-killed"])
def test_the_directory_vanishes_below_a_running_engine(
    entry_point: str, host_dies: bool, reference: Reference, site: Site
) -> None:
    """What is in RAM goes on being served; what was on the disk is computed."""
    gate = site.directory / "gate"
    os.mkfifo(gate)  # who writes to it waits until somebody reads
    wave = few(reference.conversations[0], CONVERSATIONS)
    in_ram = few(wave, PROMPTS_IN_RAM)
    gated = in_ram.model_copy(update={"files": {gate: "on"}})
    waves = (wave, in_ram, gated, in_ram, wave, in_ram, in_ram)
    scenario = through(entry_point, little_memory(site, waves))
    with EngineProcess(scenario, site.directory, entry_point) as engine:
        engine.wait_for("wave")
        engine.wait_for("wave")
        shutil.rmtree(site.store)
        if host_dies:
            os.kill(host_of(engine.pid), signal.SIGKILL)
        assert gate.read_text() == "on"
        report = engine.result()
    reference.assert_equal(report, waves=waves)
    for number in (2, 3, 6):
        assert counted(report.waves[number], "kvtier_hit_tokens", tier="ram") > 0
    assert report.count("kvtier_internal_errors") == 0
    assert ("or removed while in use" in site.log(entry_point)) == (not host_dies)
    assert ("starting its I/O process again" in site.log(entry_point)) == host_dies
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()


@pytest.mark.slow
@every_entry_point
def test_a_tier_that_stops_answering_is_passed_over_and_used_again(
    entry_point: str, faulty_site: FaultySite
) -> None:
    """Its process stands still for a while; nobody waits for it longer than a deadline."""
    site = faulty_site.site
    stop, resume = (site.directory / name for name in ("stop", "resume"))
    for gate in (stop, resume):
        os.mkfifo(gate)
    talk = few(site.reference.conversations[0], PROMPTS)
    in_ram = few(talk, PROMPTS_IN_RAM)
    waves = (
        talk,
        talk.model_copy(update={"files": {stop: "stopped"}}),
        in_ram,
        in_ram,
        talk.model_copy(update={"files": {resume: "resumed"}}),
        talk,
    )
    scenario = faulty_site.scenario(waves, entry_point=entry_point, breaker_failures=None)
    assert scenario.config is not None
    settings = yaml.safe_load(scenario.config.read_text())
    settings["transfer"]["store_timeout"] = f"{LOAD_TIMEOUT_S}s"
    scenario.config.write_text(yaml.safe_dump(settings))
    with EngineProcess(scenario, site.directory, entry_point) as engine:
        engine.wait_for("wave")
        host = host_of(engine.pid)
        os.kill(host, signal.SIGSTOP)
        assert stop.read_text() == "stopped"
        for _ in range(3):
            engine.wait_for("wave")
        os.kill(host, signal.SIGCONT)
        assert resume.read_text() == "resumed"
        report = engine.result()
    site.reference.assert_equal(report, waves=waves)
    assert counted(report.waves[1], "kvtier_expired_jobs", tier="nvme") > 0
    assert counted(report.waves[3], "kvtier_hit_tokens", tier="ram") > 0
    assert counted(report.waves[5], "kvtier_hit_tokens", tier="nvme") > 0
    assert "no answer after" in site.log(entry_point)
    assert report.count("kvtier_internal_errors") == 0
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()


def host_of(pid: int) -> int:
    """Return the process id of the tier host that the engine ``pid`` started."""
    (host,) = (
        child
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        if b"kvtier.tiers.hosted.host" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return host


@pytest.mark.slow
@every_entry_point
def test_a_reset_amid_traffic_leaves_no_stale_byte_in_any_tier(
    entry_point: str, faulty_site: FaultySite
) -> None:
    """The model's weights change with the reset, so one block of before is other tokens.

    The disk stalls, so that chunks are on their way up when everything is forgotten.
    """
    site, reference = faulty_site.site, faulty_site.site.reference
    wave = few(reference.conversations[0], PROMPTS, max_tokens=1)
    backwards = wave.model_copy(update={"prompts": wave.prompts[::-1]})
    change = {"reset_after_steps": 1, "reweigh": True}
    plain = Scenario(
        model=reference.model,
        waves=(few(wave, 1, **change), wave),
        gpu_blocks=2048,
    )
    changed = {
        answer.prompt: answer.tokens
        for answer in run_engine(plain, site.directory, "plain").waves[1].answers
    }
    kept = [prompt for prompt in changed if changed[prompt] == reference.answers[prompt][:1]]
    assert len(kept) < len(changed) / 4, "the other weights are not felt"

    stalls = FaultPlan(name="stalls", fault=DiskFault.STALL, one_in=2)
    # In the order of before: what it begins with is the first that left RAM.
    amid = wave.model_copy(update=change | {"reset_after_steps": 3})
    waves = (wave, wave, faulty_site.faulty(amid, stalls), faulty_site.well(wave), backwards)
    scenario = faulty_site.scenario(waves, entry_point=entry_point)
    report = run_engine(scenario, site.directory, entry_point)
    assert faulty_site.injections("stalls"), "nothing was on its way"
    assert entry_point != "direct" or "not reset yet" in site.log(entry_point), (
        "no load was on its way"
    )
    before, after = report.waves[1], report.waves[2]
    assert hit_tokens(Report(waves=(before,)), "nvme") > 0
    ended_after = [answer for answer in after.answers if answer.after_reset]
    assert ended_after, "the reset came too late"
    late = [*ended_after, *report.waves[3].answers, *report.waves[4].answers]
    assert [answer.tokens for answer in late] == [changed[answer.prompt] for answer in late]
    reference.assert_equal(
        report.model_copy(update={"waves": report.waves[:2]}), waves=waves[:2]
    )
    assert hit_tokens(Report(waves=report.waves[3:]), "nvme") > 0, "what is new is found again"
    assert_only_late_jobs_hold(report)
    site.assert_nothing_held()
