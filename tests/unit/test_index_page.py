"""The README as a package index shows it: setup.py rewrites its links."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = "https://example.org/them/inprocess"
for_an_index = runpy.run_path(str(ROOT / "setup.py"))["for_an_index"]


@pytest.mark.parametrize(
    ("text", "with_source", "without"),
    [
        ("[a page](docs/a.md)", f"[a page]({SOURCE}/blob/v1.0/docs/a.md)", "a page"),
        ("[a place](./docs/a.md#there)", f"[a place]({SOURCE}/blob/v1.0/docs/a.md#there)", "a place"),
        ("[`code`](inprocess)", f"[`code`]({SOURCE}/blob/v1.0/inprocess)", "`code`"),
        ('[it](a.md "a title")', f'[it]({SOURCE}/blob/v1.0/a.md "a title")', "it"),
        ("![curve](docs/a.svg)", f"![curve]({SOURCE}/raw/v1.0/docs/a.svg)", "curve"),
        (
            '<picture><source srcset="b"><img src="a" alt="a curve"></picture>',
            f'<picture><source srcset="{SOURCE}/raw/v1.0/b"><img src="{SOURCE}/raw/v1.0/a" alt="a curve"></picture>',
            "a curve",
        ),
        ("[![curve](a.svg)](a.md)", f"[![curve]({SOURCE}/raw/v1.0/a.svg)]({SOURCE}/blob/v1.0/a.md)", "curve"),
    ],
)
def test_links_to_files(text: str, with_source: str, without: str) -> None:
    assert for_an_index(text, SOURCE, "1.0") == with_source
    assert for_an_index(text, SOURCE + "/", "1.0") == with_source
    assert for_an_index(text, None, "1.0") == without


@pytest.mark.parametrize(
    "text",
    [
        "[elsewhere](https://pytorch.org/docs)",
        "[further down](#limits)",
        "[write](mailto:them@example.org)",
        "```python\ntable[name](value)\n```",
        "list[0] (the first)",
    ],
)
def test_what_stays(text: str) -> None:
    assert for_an_index(text, SOURCE, "1.0") == text
    assert for_an_index(text, None, "1.0") == text


def test_nothing_else_of_the_readme_changes() -> None:
    """Each link is rewritten in its place: with the addition taken away again it is the README."""
    readme = (ROOT / "README.md").read_text()
    page = for_an_index(readme, SOURCE, "1.0")
    assert page.replace(f"{SOURCE}/blob/v1.0/", "").replace(f"{SOURCE}/raw/v1.0/", "") == readme
    assert len(re.findall(rf"\]\({SOURCE}/(?:blob|raw)/v1.0/", page)) == len(re.findall(r"\]\((?!https?:|#)", readme))
