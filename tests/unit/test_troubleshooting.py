"""docs/troubleshooting.md quotes log lines and errors as the library prints them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
#: a fragment of fewer words may be made of several strings
WORDS = 3


def printed() -> list[str]:
    """The strings of the source, where a value is filled in two of them."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "inprocess").rglob("*.py"))
    strings = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [piece for text in strings if isinstance(text, str) for piece in re.split(r"%[-.\d]*[a-z]", text)]


def fragments(quote: str) -> list[str]:
    """What a line quotes between the places that are left open, without the name of an exception."""
    found = [part.strip(" :;,.") for part in re.sub(r"^[A-Z]\w+: ", "", quote).split("...")]
    return [part for part in found if len(part.split()) >= WORDS]


def test_what_is_quoted_is_what_the_library_prints() -> None:
    quotes = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(quotes) >= 20
    pieces = printed()
    wrong = {
        quote: [part for part in fragments(quote) if not any(part in piece for piece in pieces)] for quote in quotes
    }
    assert {quote: parts for quote, parts in wrong.items() if parts} == {}
    assert not [quote for quote in quotes if not fragments(quote)]


def test_each_entry_says_what_to_do() -> None:
    entries = PAGE.split("\n## ")[1:]
    assert 12 <= len(entries) <= 20
    for entry in entries:
        assert entry.count("**Meaning.**") == entry.count("**What to do.**") == 1, entry
