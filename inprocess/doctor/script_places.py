"""Places in the user's source: out of texts of events, and the `except` that catches too much around a line."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator

__all__ = ["handler_around", "place_in", "places_in"]

_PLACE = re.compile(r"([^\s`'\",(]+\.py):(\d+)(?: in ([\w<>.]+))?")
#: what is caught together with the interruption of a restart
INTERRUPTIONS = frozenset({"BaseException", "RankShouldRestart"})
ERRORS = INTERRUPTIONS | {"Exception", "ValueError"}


def places_in(text: str) -> list[str]:
    """All ``train.py:12`` of a text."""
    return list(dict.fromkeys(f"{file}:{line}" for file, line, _ in _PLACE.findall(text)))


def place_in(text: str) -> str:
    """The first one; empty without one."""
    return next(iter(places_in(text)), "")


def handler_around(place: str, caught: frozenset[str]) -> str:
    """The `except` that catches one of these names, or everything, around the line; empty where there is none."""
    file, _, line = place.rpartition(":")
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read())
        found = [handler.lineno for handler in _handlers(tree, int(line)) if _catches(handler, caught)]
        if found:
            return f"{file}:{found[-1]}"
    return ""


def _handlers(tree: ast.AST, line: int) -> Iterator[ast.ExceptHandler]:
    """Of the try statements with this line in their body, from the outermost inwards."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            yield from node.handlers


def _catches(handler: ast.ExceptHandler, names: frozenset[str]) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(getattr(kind, "attr", getattr(kind, "id", "")) in names for kind in kinds)
