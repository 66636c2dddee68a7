"""Escape unprintable characters in untrusted names, for terminals and logs."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return ``text`` with its unprintable characters escaped.

    The name of a file or of a model may contain terminal sequences or line breaks.

    >>> print(printable("kept\x1b[2Jwhole\n"))
    kept\x1b[2Jwhole\n
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
