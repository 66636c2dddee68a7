"""The commands, run as a shell runs them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.cli._commands import EXAMPLES
from kvtier.config import schema
from kvtier.doctor import _examine
from kvtier.os.limits import HugePagePool
from tests.unit.model_shapes import LLAMA_8B
from tests.unit.shell import Ran, Shell

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = str(CONFIGS / "demo.yaml")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return Shell(monkeypatch, capsys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration that works on any machine."""
    file = tmp_path / "it's.yaml"
    file.write_text(
        "tiers:\n"
        "  - {kind: ram, capacity: 32MiB}\n"
        f"  - {{kind: nvme, path: '{tmp_path}/store', capacity: 64MiB}}\n"
    )
    return file


def test_the_version_is_the_package_s(shell: Shell) -> None:
    assert shell("--version") == Ran(0, f"kvtier {kvtier.__version__}\n", "")


def test_a_policy_that_cannot_be_made_is_a_problem(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # paths of parallel tests are long
    file = tmp_path / "own.yaml"
    file.write_text(
        "tiers: [{kind: ram, capacity: 1MiB}]\n"
        "placement: {policy: 'kvtier.policies:Eviction'}\n"
    )
    ran = shell("check", file)
    assert (ran.code, ran.err) == (1, "")
    text = " ".join(ran.out.split())
    assert "own.yaml:2: placement.policy = kvtier.policies:Eviction: " in text
    assert "is no Placement remedy: derive it from kvtier.policies.Placement" in text


def test_a_file_that_works_here_is_ok(shell: Shell, config: Path) -> None:
    ran = shell("check", config)
    assert (ran.code, ran.err) == (0, "")
    assert "it's.yaml: " in ran.out.splitlines()[-1]
    assert "problem" not in ran.out
    assert "ram of 32.0 MiB" in ran.out


def test_a_warning_does_not_fail(shell: Shell, config: Path) -> None:
    config.write_text(config.read_text().replace("32MiB", "64MiB"))
    ran = shell("check", config)
    assert (ran.code, ran.err) == (0, "")
    assert "warning  configuration" in ran.out
    assert f"at:{config}:3:tiers[1].capacity=64MiB" in "".join(ran.out.split())


def test_every_problem_is_an_error_line_without_a_traceback(shell: Shell, config: Path) -> None:
    config.write_text("tiers: [{kind: ram, capacity: 32M}]\nshadows: []\n")
    ran = shell("check", config)
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: {config}:1: tiers[0].capacity = 32M: 'M' is not a unit")
    assert second.startswith(f"error: {config}:2: shadows: unknown key; did you mean shadow?")


@pytest.mark.parametrize("command", ["check", "plan", "vllm-args"])
@pytest.mark.parametrize("text", [None, "tiers: [", "tiers: {}\n\tx: 1", "a: 1\na: 2", "b: 1"])
def test_a_newline_in_a_file_s_name_leaves_each_error_on_one_line(
    shell: Shell, tmp_path: Path, command: str, text: str | None
) -> None:
    file = tmp_path / "a\nb.yaml"
    if text is not None:
        file.write_text(text)
    ran = shell(command, file, *(("--model", tmp_path) if command == "plan" else ()))
    assert ran.code == 2
    assert all(r"a\nb.yaml:" in line for line in ran.err.splitlines())


@pytest.mark.parametrize("command", [("cache", "stat"), ("cache", "evict", "--all", "--yes")])
def test_a_newline_in_a_store_s_name_leaves_its_error_on_one_line(
    shell: Shell, tmp_path: Path, command: tuple[str, ...]
) -> None:
    ran = shell(*command, tmp_path / "a\nb")
    assert ran.err == (
        f"error: {tmp_path}/a\\nb does not exist; give the path of an nvme tier\n"
    )


@pytest.mark.parametrize("command", ["check", "doctor", "vllm-args"])
def test_a_file_that_may_not_be_read_is_named_with_a_remedy(
    shell: Shell, config: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(Path, "open", refuse)
    problem = "cannot be read: Permission denied; check its permissions"
    assert shell(command, config) == Ran(2, "", f"error: {config}: {problem}\n")


def test_a_check_can_be_read_by_a_program(shell: Shell, config: Path) -> None:
    report = json.loads(shell("check", config, "--json").out)
    assert report["status"] in {"ok", "note", "warning"}
    assert report["config"]["tiers"][0]["capacity"] == "32MiB"


def test_a_check_for_several_ranks_says_what_they_need(shell: Shell, config: Path) -> None:
    text = config.read_text()
    config.write_text(text.replace("store", "{data_parallel_rank}"))
    assert "add --data-parallel-size N" in shell("check", config).out
    ran = shell("check", config, "--data-parallel-size", 3)
    assert ran.code == 0
    assert "3 ranks need 96.0 MiB of memory and 192 MiB of slower tiers" in ran.out
    config.write_text(text)
    ran = shell("check", config, "--data-parallel-size", 3)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {config}:3: tiers[1].path = ")
    assert ran.err.endswith("/store/{data_parallel_rank}\n")


def test_a_plan_is_for_one_rank_and_says_so(shell: Shell, config: Path, model: Path) -> None:
    ran = shell("plan", config, "--model", model)
    assert "data-parallel" not in ran.out
    config.write_text(config.read_text().replace("store", "{data_parallel_rank}"))
    ran = shell("plan", config, "--model", model)
    assert "each rank has its own" in " ".join(ran.out.split())


@pytest.mark.parametrize(("free", "code"), [(16, 1), (17, 0)])
def test_a_file_that_requires_huge_pages_is_ok_only_where_there_are_enough(
    shell: Shell, config: Path, monkeypatch: pytest.MonkeyPatch, free: int, code: int
) -> None:
    pool = HugePagePool(2 << 20, total=20, free=free)
    monkeypatch.setattr(_examine, "huge_page_pool", lambda _: pool)
    text = config.read_text()
    assert shell("check", config).code == 0
    config.write_text(text.replace("32MiB", "32MiB, huge_pages: require"))
    ran = shell("check", config)
    assert ran.code == code
    if code:
        assert "problem  huge pages" in ran.out
        assert "the RAM tier needs 17; 16 are reserved and free" in ran.out
        assert f"at:{config}:2:tiers[0].huge_pages=require" in "".join(ran.out.split())
        assert "sysctl -w vm.nr_hugepages=21\n" in ran.out


def test_wrong_usage_has_the_same_exit_code(shell: Shell) -> None:
    for arguments in (("chek", DEMO), ("check",), ("plan", DEMO), ("plan", DEMO, "--tp", "0")):
        ran = shell(*arguments)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("error: ")
        assert ran.err.endswith(" --help\n")
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", DEMO, "--seconds"),
        ("sim", "run", "trace", "--config", DEMO, "--prefill-rate"),
        ("trace", "generate", "chat", "-o", "file", "--per-s"),
        ("replay", "trace", "--config", DEMO, "--speedup"),
    ],
)
def test_an_infinite_number_is_refused(shell: Shell, arguments: tuple[str, ...]) -> None:
    ran = shell(*arguments, "inf")
    problem = f"error: invalid value for '{arguments[-1]}': not a finite number; see kvtier "
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(problem)


def test_more_ranks_than_there_are_anywhere_are_refused_at_once(shell: Shell) -> None:
    ran = shell("check", DEMO, "--data-parallel-size", 10**12)
    assert (ran.code, ran.out) == (2, "")
    assert "'--data-parallel-size'" in ran.err
    assert "4096" in ran.err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ("vllm-args", DEMO, "--entry-point", "foo"),
            "--entry-point foo: not a choice; write one of ",
        ),
        (("plan", DEMO, "--model", "/x", "--kv-dtype", "int3"), "--kv-dtype int3: not a choi"),
        (("cache", "ls", "--sort", "age", "/tmp"), "--sort age: not a choice; write one of la"),
        (("example", "mine"), "NAME mine: not a choice; write one of demo, ram, ram_nvme"),
    ],
)
def test_a_word_that_is_no_choice_is_refused_with_those_there_are(
    shell: Shell, arguments: tuple[str, ...], names: str
) -> None:
    ran = shell(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {names}")
    assert ran.err.count("\n") == 1


def test_no_command_at_all_is_answered_with_the_help(shell: Shell) -> None:
    for group in ((), ("sim",)):
        ran = shell(*group)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("Usage: kvtier ")
        assert "Commands:" in ran.err


def test_an_example_is_the_file_of_that_name_and_is_what_the_help_begins_with(
    shell: Shell,
) -> None:
    files = {path.stem: path.read_text() for path in CONFIGS.glob("*.yaml")}
    assert files.keys() == EXAMPLES.keys()
    for name, text in files.items():
        assert shell("example", name) == Ran(0, text, "")
    assert shell("example") == Ran(0, files["demo"], "")
    assert "Start with: kvtier example > kvtier.yaml" in shell("--help").out
    assert "kvtier example > kvtier.yaml" in shell("check", "/no/such/file").err


@pytest.mark.parametrize(
    ("command", "output", "code", "said"),
    [
        ("schema", "closed", 141, ""),
        ("example", "closed", 141, ""),
        ("schema", "/dev/full", 2, "error: the output cannot be written: No space left on "),
        ("example", "/dev/full", 2, "error: the output cannot be written: No space left on "),
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_traceback(
    command: str, output: str, code: int, said: str
) -> None:
    if output == "closed":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_WRONLY)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "kvtier", command],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=50,
        )
    finally:
        os.close(writer)
    assert ran.returncode == code
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("\n") == (1 if said else 0)


def test_a_command_with_a_closed_output_ends_without_an_error() -> None:
    program = 'exec "$0" -m kvtier example >&-'
    ran = subprocess.run(
        ["sh", "-c", program, sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=50,
        cwd=CONFIGS.parent,
    )
    assert (ran.returncode, ran.stderr.count("Traceback")) == (0, 0)


@pytest.mark.parametrize("module", ["kvtier.cli._app", "kvtier.cli._commands"])
def test_an_interrupt_while_commands_are_loaded_is_130_without_a_traceback(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    class Interrupter:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == module:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupter, *sys.meta_path])
    assert shell("schema") == Ran(130, "", "")


def test_the_schema_is_printed_as_json(shell: Shell) -> None:
    assert json.loads(shell("schema").out) == schema()


def test_a_plan_counts_the_tokens_each_tier_holds(shell: Shell, model: Path) -> None:
    ran = shell("plan", CONFIGS / "ram_nvme.yaml", "--model", model)
    rows = {line.split()[0]: " ".join(line.split()) for line in ran.out.splitlines() if line}
    assert rows["ram"] == "ram ram 64.0 GiB 8,192 524,288 52.4 s"
    assert rows["nvme"] == "nvme nvme 1.00 TiB 131,072 8,388,608 13 min 59 s"
    assert "one token 1 128 KiB 131,072" in " ".join(ran.out.split())
    assert "Not included" in ran.out


def test_a_plan_can_be_read_by_a_program(shell: Shell, model: Path) -> None:
    arguments = ("--tp", 2, "--kv-dtype", "fp8", "--block-tokens", 32, "--prefill-rate", 16384)
    ran = shell("plan", CONFIGS / "ram.yaml", "--model", model, *arguments, "--json")
    plan = json.loads(ran.out)
    assert plan["token_nbytes"] == 64 << 10
    assert plan["chunk_tokens"] == 128
    assert plan["chunk_nbytes"] == plan["slot_nbytes"] == 8 << 20
    assert plan["prefill_bytes_per_s"] == 1 << 30
    assert plan["block_tokens"] == 32
    assert plan["tiers"][0]["tokens"] == 1 << 20
    assert plan["tiers"][0]["fill_s"] == 64.0


def test_a_plan_says_when_ranks_hold_copies(shell: Shell, model: Path) -> None:
    ran = shell("plan", CONFIGS / "ram.yaml", "--model", model, "--tp", 16)
    assert "2 ranks hold the same bytes of each KV head" in ran.out


def test_a_plan_counts_a_replicated_latent_once_per_rank(shell: Shell, model: Path) -> None:
    latent = {**LLAMA_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (model / "config.json").write_text(json.dumps(latent))
    arguments = ("--model", model, "--tp", 4, "--kv-dtype", "fp8", "--json")
    plan = json.loads(shell("plan", DEMO, *arguments).out)
    assert plan["token_nbytes"] == 4 * 32 * 576
    assert plan["slot_nbytes"] == -(-plan["chunk_nbytes"] // 4096) * 4096
    assert any("copies are counted" in note for note in plan["notes"])
    assert any("scales" in note for note in plan["notes"])


def test_a_plan_counts_whole_slots_however_small_the_chunk(shell: Shell, model: Path) -> None:
    tiny = {**LLAMA_8B, "num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 32}
    (model / "config.json").write_text(json.dumps(tiny))
    plan = json.loads(shell("plan", DEMO, "--model", model, "--json").out)
    assert (plan["chunk_nbytes"], plan["slot_nbytes"]) == (16 * 4, 4096)
    assert plan["tiers"][0]["tokens"] == (512 << 20) // 4096 * 16


@pytest.mark.parametrize("columns", ["60", None])
def test_no_command_shreds_words_or_ends_lines_with_blanks(
    shell: Shell,
    config: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", columns)
    printed = {
        "check": shell("check", config).out,
        "doctor": shell("doctor", "--seconds", "0.1", config).out,
        "plan": shell("plan", config, "--model", model).out,
    }
    for command, text in printed.items():
        lines = text.splitlines()
        assert lines == [line.rstrip() for line in lines], command
        assert lines[0], command
    assert f"{config.parent}/store" in "".join(printed["check"].split())
    if columns is None:
        assert "the chunk size it uses.\n" in printed["plan"].split("- Not included")[1]
        assert printed["plan"].split("- Not included")[1].count("\n") == 1
        for line in printed["doctor"].splitlines():
            assert line[:1] != " " or line.strip().startswith(("at: ", "remedy: "))


def test_a_plan_refuses_a_tier_that_holds_no_chunk(shell: Shell, model: Path) -> None:
    ran = shell("plan", DEMO, "--model", model, "--block-tokens", 1 << 20)
    assert ran.code == 2
    assert f"{DEMO}:4: tiers[0].capacity = 512MiB: smaller than one chunk" in ran.err
    assert "which takes 128GiB" in ran.err


def test_a_plan_names_what_it_assumes_about_the_engine_and_nothing_else(
    shell: Shell, model: Path
) -> None:
    ran = shell("plan", DEMO, "--model", model)
    said = " ".join(ran.out.split())
    assert "A block has 16 tokens, which is assumed; give the engine's --block-size as" in said
    assert "10,000 prompt tokens per second, which are assumed (--prefill-rate), fill" in said
    options = ("--block-tokens", 32, "--prefill-rate", 20000)
    said = " ".join(shell("plan", DEMO, "--model", model, *options).out.split())
    assert "A block has 32 tokens. - 20,000 prompt tokens per second fill a tier" in said
    assert "assumed" not in said


def test_the_engine_s_arguments_survive_a_shell(shell: Shell, config: Path) -> None:
    line = shell("vllm-args", config).out
    option, value = shlex.split(line)
    assert option == "--kv-transfer-config"
    assert line.count("\n") == 1
    assert json.loads(value)["kv_connector_extra_config"]["kvtier_config"] == str(config)
    assert shell("vllm-args", config, "--json").out == f"{value}\n"


@pytest.mark.parametrize("command", ["check", "doctor", "vllm-args"])
def test_a_model_whose_name_is_too_long_is_one_error_line(
    shell: Shell, config: Path, command: str
) -> None:
    ran = shell(command, config, "--model", "a" * 300)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: model aaa")
    assert ran.err.count("\n") == 1


def test_arguments_that_the_entry_point_would_refuse_are_not_printed(
    shell: Shell, config: Path
) -> None:
    config.write_text(f"{config.read_text()}transfer:\n  load_path: direct\n")
    assert shell("vllm-args", config).code == 0
    assert shell("vllm-args", config, "--entry-point", "spec") == Ran(
        2,
        "",
        f"error: {config}:5: transfer.load_path = direct: the spec entry point cannot report "
        "a load that fails; use --entry-point connector of `kvtier vllm-args`, or "
        "load_path: staged\n",
    )


def packages_loaded_by(*arguments: str) -> set[str]:
    """Return the packages, and the parts of kvtier, that a command imports."""
    program = (
        "import sys, kvtier.cli\n"
        "try: kvtier.cli.main()\n"
        "except SystemExit: print('\\n', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=CONFIGS.parent,
    )
    names = [name.split(".") for name in done.stdout.splitlines()[-1].split()]
    return {".".join(name[: 2 if name[0] == "kvtier" else 1]) for name in names}


def test_the_help_loads_the_commands_names_only() -> None:
    loaded = packages_loaded_by("--help")
    assert "typer" in loaded
    assert not {"numpy", "pydantic", "rich", "torch", "vllm", "yaml"} & loaded
    assert {name for name in loaded if name.startswith("kvtier.")} == {
        "kvtier.cli",
        "kvtier.errors",
        "kvtier.printable",
        "kvtier.units",
    }


def test_a_check_of_kvtier_s_own_policies_loads_no_manager_and_no_numpy(config: Path) -> None:
    loaded = packages_loaded_by("check", str(config))
    assert "kvtier.config" in loaded
    heavy = {"asyncio", "numpy", "torch", "vllm"}
    assert not (heavy | {"kvtier.manager", "kvtier.sim", "kvtier.transfer"}) & loaded
