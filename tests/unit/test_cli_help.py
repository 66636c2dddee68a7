"""What the help of every command looks like on a narrow and on a wide terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kvtier.cli._app import app


def help_of(*command: str, width: int) -> str:
    answer = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*command, "--help"])
    assert answer.exit_code == 0
    return answer.stdout


def listing(text: str) -> dict[str, str]:
    """Return the summaries of a group's commands, by name."""
    _, _, commands = text.partition("Commands:")
    return dict(re.findall(r"^  ([a-z-]+)  +(\S.*)$", commands, re.MULTILINE))


def groups_and_commands(*group: str) -> Iterator[tuple[str, ...]]:
    yield group
    for name in listing(help_of(*group, width=80)):
        yield from groups_and_commands(*group, name)


EVERYTHING = list(groups_and_commands())
NAMES = [" ".join(["kvtier", *command]) for command in EVERYTHING]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", EVERYTHING, ids=NAMES)
def test_a_help_fits_and_says_nothing_in_the_words_of_the_source(
    command: tuple[str, ...], width: int
) -> None:
    text = help_of(*command, width=width)
    assert max(map(len, text.splitlines())) <= width
    usage = text.splitlines()[0]
    assert usage.startswith(f"Usage: {' '.join(['kvtier', *command])} [OPTIONS]")
    assert not re.search(r"[{}<>]", usage), usage
    for line in text.splitlines():
        assert not re.search(r"<\w|>=|\b(str|TEXT|PATH|INTEGER|FLOAT)\b", line), line
        assert line.count("default:") <= 1
    assert not [line for line in listing(text).values() if line.endswith("...")]


def test_every_argument_of_a_command_is_explained_under_its_name() -> None:
    for command in EVERYTHING:
        text = help_of(*command, width=80)
        usage, _, rest = text.partition("\n")
        if "COMMAND" in usage:
            continue
        words = usage.removeprefix(f"Usage: kvtier {' '.join(command)} [OPTIONS]")
        named = re.findall(r"[A-Z]+", words)
        _, _, arguments = rest.partition("Arguments:\n")
        explained = re.findall(r"^  ([A-Z]+)  +\S", arguments, re.MULTILINE)
        assert explained == named, command
        own = [name for name in named if name != "ARGS"]  # these are vLLM's
        in_order = own[:1] == ["DIR"] or own[-1:] in (["DIR"], ["OUT"])
        assert in_order or command[0] != "cache", "what is read comes first"


def test_a_listing_says_of_a_command_what_its_own_help_says_first() -> None:
    for command in EVERYTHING:
        for name, summary in listing(help_of(*command, width=80)).items():
            own = help_of(*command, name, width=200).splitlines()
            assert own[2].strip() == summary, name
