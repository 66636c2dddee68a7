"""``kvtier cache coverage`` prints how many tokens of given prompts a cache has."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli._options import AsJson, Only, Store, choice, filled, numpy_needed
from kvtier.cli._render import make_console, make_table, show_json, show_line, show_table
from kvtier.keys import ChunkKey, strip_adapter
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.units import approximate_size

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.coverage import (
        BadLine,
        Coverage,
        CoverageReader,
        ParsedArguments,
        Prompt,
        PromptCoverage,
        PromptLine,
        StoredKeys,
    )
    from kvtier.tiers.slab.inspect import StoredNamespace

__all__ = [
    "BAD_LINES",
    "EngineArguments",
    "OnBadLine",
    "Prompts",
    "coverage",
    "coverage_rows",
    "needed_by",
    "show_rows",
]

BAD_LINES = ("fail", "skip")

Prompts = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Prompts, JSON Lines: prompt, prompt_token_ids or messages in each line.",
        readable=False,
    ),
]
OnBadLine = Annotated[
    str,
    typer.Option(metavar="WHAT", help="What to do with an invalid line: fail or skip."),
]
EngineArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS", help="The deployment's other arguments of 'vllm serve', after --."
    ),
]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The coverage of the prompts in one namespace, in total and for each prompt."""

    space: StoredNamespace
    total: Coverage
    prompts: Sequence[PromptCoverage]
    nbytes_per_token: float


def coverage(  # noqa: PLR0913 - each is an option of the command
    directory: Store,
    arguments: EngineArguments = None,
    *,
    prompts: Prompts,
    model: Annotated[str, typer.Option(metavar="MODEL", help="The engine's --model.")],
    namespace: Only = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, metavar="N", help="Prompts to list; 0 lists all.")
    ] = 20,
    on_bad_line: OnBadLine = "fail",
    as_json: AsJson = False,
) -> None:
    """Print how many tokens of each prompt a cache has.

    Lists the prompts that would compute most. Starts no engine; vLLM is only needed for prompts
    that are not token ids. Only reads, and may run beside an engine.
    """
    with numpy_needed("kvtier cache coverage", "sim"):
        from kvtier.coverage import namespaces_of_model  # noqa: PLC0415 - imports asyncio, numpy

    skips = choice("--on-bad-line", on_bad_line, BAD_LINES) == "skip"
    spaces = filled(namespaces_of_model(directory, model, namespace))
    setup = _Setup(model, arguments or ())
    found = _read(prompts, setup, skips=skips)
    answers = [_answer(space, found, setup) for space in spaces]
    if as_json:
        show_json([_document(answer, limit) for answer in answers])
        return
    console = make_console()
    for answer in answers:
        show_line(console, f"{answer.space.name}  {answer.space.layout.model}")
        rows = coverage_rows(answer.total, nbytes_per_token=answer.nbytes_per_token)
        show_rows(console, rows)
        _show_prompts(console, answer, limit)


class _Setup:
    """vLLM's engine arguments, parsed at their first use."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        self._model = model
        self._arguments = arguments

    @functools.cached_property
    def engine(self) -> ParsedArguments:
        from kvtier.coverage import open_vllm  # noqa: PLC0415 - as above

        return open_vllm(self._model, self._arguments, None)

    @property
    def given(self) -> ParsedArguments | None:
        """The parsed arguments; None if the user gave no arguments."""
        return self.engine if self._arguments else None


def _read(path: Path, setup: _Setup, *, skips: bool) -> list[Prompt]:
    from kvtier.coverage import load_prompts, to_prompt  # noqa: PLC0415 - as above

    async def read(number: int, line: PromptLine) -> Prompt:
        return to_prompt(number, line, lambda: setup.engine)

    def note(bad: BadLine) -> None:
        typer.echo(f"note: {bad.error(path)}", err=True)

    return asyncio.run(load_prompts(path, read, on_bad=note if skips else None))


def needed_by(
    prompts: Path, space: StoredNamespace, model: str, arguments: Sequence[str]
) -> Callable[[ChunkKey], bool]:
    """Return a predicate on keys: whether a prompt in the file ``prompts`` needs the chunk."""
    with numpy_needed("kvtier cache export --prompts", "sim"):
        import kvtier.coverage  # noqa: F401, PLC0415 - imports asyncio and numpy

    setup = _Setup(model, arguments)
    reader = _reader(space, setup, {})
    needed: set[int] = set()
    for prompt in _read(prompts, setup, skips=False):
        needed.update(reader.cover(prompt).key_hashes.tolist())
    return lambda key: hash_key(strip_adapter(key)) in needed


def _reader(
    space: StoredNamespace, setup: _Setup, stores: Mapping[str, StoredKeys]
) -> CoverageReader:
    from kvtier.coverage import CoverageReader, KeyRules  # noqa: PLC0415 - as above

    given = setup.given
    rules = KeyRules.of(space, algorithm=given.algorithm) if given else KeyRules.of(space)
    return CoverageReader(rules, stores, lora_paths=given.lora_paths if given else {})


def _answer(space: StoredNamespace, prompts: Sequence[Prompt], setup: _Setup) -> _Answer:
    from kvtier.coverage import Coverage, KeyRules, StoredKeys  # noqa: PLC0415 - as above

    stored = StoredKeys.read(space, with_adapters=False)
    reader = _reader(space, setup, {"stored": stored})
    total, covered = Coverage(), []
    for prompt in prompts:
        one = reader.cover(prompt)
        total.add(one)
        covered.append(one)
    nbytes = space.layout.slot_nbytes * KeyRules.of(space).chunks_per_token
    return _Answer(space, total, covered, nbytes)


def coverage_rows(total: Coverage, *, nbytes_per_token: float) -> Iterator[tuple[str, str]]:
    """Yield the figures of a coverage as pairs of a name and a text."""
    missing = total.prompts - total.whole - total.partly - total.short
    counts = f"{total.whole:,} stored, {total.partly:,} in part, {missing:,} not"
    if total.short:
        counts += f", {total.short:,} too short to store"
    yield "prompts", f"{total.prompts:,}: {counts}"
    yield "tokens", f"{total.tokens:,}, of which {total.reusable_tokens:,} reusable"
    for name, tokens in total.tier_tokens.items():
        size = approximate_size(tokens * nbytes_per_token)
        yield name, f"{tokens:,} tokens, {size} to load"
    yield "covered", f"{total.share:.1%} of the reusable tokens"


def show_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print one line for each pair of a name and a text."""
    table = make_table("", "", numbers=())
    for row in rows:
        table.add_row(*row)
    show_table(console, table)


def _document(answer: _Answer, limit: int) -> dict[str, object]:
    return {
        "namespace": answer.space.name,
        "model": answer.space.layout.model,
        **answer.total.as_dict(),
        "lines": [
            {
                "line": each.line,
                "tokens": each.tokens,
                "reusable_tokens": each.reusable_tokens,
                "hit_tokens": each.hit_tokens,
            }
            for each in _worst(answer, limit)
        ],
    }


def _worst(answer: _Answer, limit: int) -> Iterator[PromptCoverage]:
    """Yield the ``limit`` prompts (0: all) with the most tokens to compute, worst first."""
    by_loss = sorted(
        answer.prompts, key=lambda each: (each.hit_tokens - each.reusable_tokens, each.line)
    )
    yield from by_loss[: limit or None]


def _show_prompts(console: Console, answer: _Answer, limit: int) -> None:
    table = make_table(numbers=("line", "tokens", "reusable", "stored"))
    for each in _worst(answer, limit):
        table.add_row(
            f"{each.line:,}",
            f"{each.tokens:,}",
            f"{each.reusable_tokens:,}",
            f"{each.hit_tokens:,}",
        )
    show_table(console, table)
