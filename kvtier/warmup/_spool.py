"""Sorts prompts so that each shared prefix is computed once.

Prompts are ordered by priority, then by LoRA adapter and cache salt, then by their tokens. So
prompts with a common prefix follow each other, and a prompt comes before the prompts that
continue it. The prompts may not fit in memory. So SQLite sorts them in a temporary file, which
it removes itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.errors import ConfigError
from kvtier.os.iopool import IoPool
from kvtier.printable import printable
from kvtier.warmup._events import LineSkipped, PromptsRead, WarmupEvent
from kvtier.warmup._prompts import BadLine, Line, Prompt, batches, read_prompts

__all__ = ["PromptSpool", "fill_spool"]

_CREATE: Final = """
CREATE TABLE prompts(
    id INTEGER PRIMARY KEY, line INTEGER, priority INTEGER, lora TEXT, salt TEXT, tokens BLOB
)
"""
_COLUMNS: Final = "id, line, priority, lora, salt, tokens"
_ORDER: Final = "ORDER BY priority, lora, salt, tokens, line"


class PromptSpool:
    """Prompts in a temporary database; used by one thread at a time."""

    def __init__(self) -> None:
        # The empty name makes a private file that SQLite keeps in memory while it is small.
        self._connection = sqlite3.connect("", check_same_thread=False)
        self._connection.execute(_CREATE)
        self.tokens = 0
        self.prompts = 0

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Add ``prompts``, in any order."""
        rows = []
        for prompt in prompts:
            self.prompts += 1
            self.tokens += len(prompt.tokens)
            # Big-endian numbers of one width compare byte by byte like the tokens.
            packed = np.array(prompt.tokens, dtype=">u4").tobytes()
            rows.append((prompt.line, prompt.priority, prompt.lora, prompt.cache_salt, packed))
        self._connection.executemany(
            "INSERT INTO prompts(line, priority, lora, salt, tokens) VALUES (?,?,?,?,?)", rows
        )

    def in_order(self) -> Iterator[tuple[int, Prompt]]:
        """Yield the id and content of every prompt, in the order in which to compute them."""
        for row in self._connection.execute(f"SELECT {_COLUMNS} FROM prompts {_ORDER}"):
            yield row[0], _prompt(row)

    def pick(self, ids: Iterable[int]) -> Iterator[Prompt]:
        """Yield the prompts with these ``ids``, in the order of ``ids``."""
        for number in ids:
            (row,) = self._connection.execute(
                f"SELECT {_COLUMNS} FROM prompts WHERE id = ?", (number,)
            )
            yield _prompt(row)

    def close(self) -> None:
        """Remove the temporary file. Idempotent."""
        self._connection.close()


def _prompt(row: tuple[int, int, int, str, str, bytes]) -> Prompt:
    _, line, priority, lora, salt, packed = row
    tokens = tuple(np.frombuffer(packed, dtype=">u4").tolist())
    return Prompt(line, tokens, priority, lora, salt)


async def fill_spool(
    spool: PromptSpool,
    path: Path,
    *,
    convert: Callable[[Sequence[Line]], Awaitable[Sequence[Prompt | BadLine]]],
    skip_bad_lines: bool,
    pool: IoPool,
) -> AsyncGenerator[WarmupEvent, None]:
    """Read a file of prompts into an empty spool, and yield the events.

    Args:
        spool: Gets the prompts.
        path: The file.
        convert: Returns the prompt in each line, or the line's problem.
        skip_bad_lines: Whether to leave out lines that are no prompts.
        pool: The pool whose thread uses the spool.

    Raises:
        ConfigError: A line is no prompt and not skipped, or there is no prompt.
    """
    skipped = 0
    async with contextlib.aclosing(batches(read_prompts(path))) as lines:
        async for batch in lines:
            found = await convert(batch)
            for bad in (each for each in found if isinstance(each, BadLine)):
                if not skip_bad_lines:
                    raise bad.error(path)
                skipped += 1
                yield LineSkipped(bad)
            prompts = [each for each in found if isinstance(each, Prompt)]
            await pool.run(partial(spool.add, prompts), priority=0)
    if not spool.prompts:
        source = printable(str(path))
        raise ConfigError(f"--prompts {source}: has no usable prompt; write one a line")
    yield PromptsRead(spool.prompts, spool.tokens, skipped)
