"""The command line's page shows commands and outputs there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli._app import app
from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.keys import short_key
from kvtier.os.iopool import IoPool
from kvtier.sim.traces import GENERATORS, Workload
from tests.docs.pages import DOCS, blocks_of
from tests.unit.stores import KEYS, Store

PAGE = DOCS / "reference/cli.md"
SECTION = re.compile(r"^## kvtier (\S.*)$", re.MULTILINE)
COMMANDS = SECTION.findall(PAGE.read_text())
MODEL = """{
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "torch_dtype": "bfloat16"
}"""


def invoke(arguments: Sequence[str]) -> str:
    """Return what kvtier prints, on a terminal as wide as the page's."""
    answer = CliRunner(env={"COLUMNS": "96"}).invoke(app, list(arguments))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def shown(command: str) -> tuple[list[str], str]:
    """Return the arguments and the output of the example that begins with ``command``."""
    for block in blocks_of(PAGE):
        prompt, _, output = block.text.partition("\n")
        if block.language == "console" and prompt.startswith(f"$ kvtier {command}"):
            return prompt.split()[2:], output
    raise AssertionError(command)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The page's configuration, in a directory with the page's model."""
    (text,) = (block.text for block in blocks_of(PAGE) if block.language == "yaml")
    (tmp_path / "kvtier.yaml").write_text(text)
    model = tmp_path / "models/llama-8b"
    model.mkdir(parents=True)
    (model / "config.json").write_text(MODEL)
    return tmp_path


def commands_below(*group: str) -> list[str]:
    """Return the commands of kvtier, or of a group, those of groups in it included."""
    _, _, listing = invoke([*group, "--help"]).partition("Commands:")
    names = re.findall(r"^  ([a-z-]+)  +\S", listing, re.MULTILINE)
    below = [commands_below(*group, name) or [" ".join([*group, name])] for name in names]
    return [command for commands in below for command in commands]


def labels(text: str) -> list[str]:
    """Return the first column of an output: what stands before two blanks."""
    return [re.split(" {2,}", line)[0] for line in text.splitlines() if line[:1].strip()]


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    assert sorted(COMMANDS) == sorted(["--version", *commands_below()])


def test_every_option_the_page_names_is_in_the_help_of_its_command() -> None:
    sections = SECTION.split(PAGE.read_text())[1:]
    for command, section in zip(sections[::2], sections[1::2], strict=True):
        if command.startswith("--"):
            continue
        text = invoke([*command.split(), "--help"])
        for option in set(re.findall(r"`(--[a-z-]+)`", section)):
            assert option in text, f"{command} {option}"


def test_the_plan_on_the_page_is_what_the_command_prints(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    arguments, output = shown("plan")
    printed = [line.rstrip() for line in invoke(arguments).split("\n")]
    assert printed == [line.rstrip() for line in output.split("\n")]


@pytest.mark.untraced
def test_the_trace_commands_print_what_the_page_shows(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    for command in ("trace generate", "trace info", "sim sweep"):
        arguments, output = shown(command)
        printed = [line.rstrip() for line in invoke(arguments).split("\n")]
        assert printed == [line.rstrip() for line in output.split("\n")]


def test_the_page_says_what_each_generator_draws() -> None:
    _, _, section = PAGE.read_text().partition("## kvtier trace generate\n")
    rows = [line.split("|")[1:-1] for line in section.split("\n## ")[0].splitlines()]
    heading, _, *body = [[cell.strip() for cell in row] for row in rows if row]
    parameters = [row[0].partition(":")[0].strip("`") for row in body]
    assert parameters == [field.name for field in fields(Workload)]
    columns = list(zip(*(map(float, row[2:]) for row in body), strict=True))
    said = dict(zip([name.strip("`") for name in heading[2:]], columns, strict=True))
    assert said == {name: astuple(workload) for name, workload in GENERATORS.items()}


def test_the_arguments_on_the_page_are_what_the_command_prints(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    arguments, output = shown("vllm-args")
    assert invoke(arguments).replace(str(example), "/etc") == output


def test_the_version_on_the_page_is_this_one() -> None:
    arguments, output = shown("--version")
    assert invoke(arguments) == output


def test_the_errors_on_the_page_are_what_the_command_says(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    text = (example / "kvtier.yaml").read_text()
    wrong = text.replace("capacity: 8GiB", "capactiy: 8 GB")
    (example / "wrong.yaml").write_text(wrong)
    _, output = shown("check wrong.yaml")
    with pytest.raises(ConfigError) as refusal:
        load_config("wrong.yaml")
    assert output == "".join(f"error: {line}\n" for line in str(refusal.value).split("\n"))


@pytest.fixture
def used_store(tmp_path: Path) -> Store:
    """A store in which a chunk was used, and from which KEYS[5] was evicted."""
    pool = IoPool(2, name="kvtier-test")
    store = Store(tmp_path / "store", pool)
    store.start()
    store.fill()
    store.tier.touch([1])
    store.put([KEYS[20]], [5])
    store.stop()
    assert pool.close(timeout_s=10)
    return store


def test_explain_of_a_removed_chunk_prints_what_the_page_shows(
    used_store: Store,
) -> None:
    arguments, output = shown("cache explain /var/lib/kvtier 10af")
    asked, shown_key = short_key(KEYS[5]), arguments[3]
    command = ["cache", "explain", str(used_store.root), asked]
    answer = CliRunner(env={"COLUMNS": "96"}).invoke(app, command)
    assert answer.exit_code == 1
    assert output.splitlines()[0] == shown_key
    assert answer.stdout.splitlines()[0] == asked
    assert labels(answer.stdout)[1:] == labels(output)[1:]
    assert answer.stdout.splitlines()[2] == output.splitlines()[2]


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "explain"])
def test_cache_commands_print_the_lines_that_the_page_shows(
    used_store: Store, command: str
) -> None:
    arguments, output = shown(f"cache {command}")
    key = [KEYS[1].hex()] if command == "explain" else []
    options = arguments[2 : len(arguments) - 1 - len(key)]
    printed = invoke(["cache", command, *options, str(used_store.root), *key])
    # Below the heading; of a list, only the columns.
    rows = slice(1, 2) if command == "ls" else slice(1, None)
    assert labels(printed)[rows] == labels(output)[rows]
