"""Names that kvtier did not choose, made fit for a terminal and a log."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return ``text`` with every character escaped that is no letter, digit, sign or space.

    A name of a file or of a model may hold sequences that move a terminal's cursor, or a line
    break that makes one line of a log two.

    >>> print(printable("kept\x1b[2Jwhole\n"))
    kept\x1b[2Jwhole\n
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
