"""pyproject.toml claims what the table in docs/versions.md says was run, and no more."""

from __future__ import annotations

import re
from pathlib import Path

from tests import versions

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
PAGE = (ROOT / "docs/versions.md").read_text()
WHOLE = "whole suite"


def rows() -> list[list[str]]:
    """Date, Python, torch, what and result of each run."""
    table = PAGE.split("## What was run")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def claimed(pattern: str) -> list[tuple[int, ...]]:
    return [minor(version) for version in re.findall(pattern, PROJECT)]


def test_every_row_is_whole_and_passed() -> None:
    assert len(rows()) >= 2
    for row in rows():
        assert len(row) == 5, row
        assert re.fullmatch(r"20\d\d-\d\d-\d\d|each change", row[0]), row
        assert re.search(r"\bpassed", row[4]), row
        assert "error" not in row[4], row


def test_the_lowest_python_is_the_lowest_that_was_run() -> None:
    assert claimed(r'requires-python = ">=([\d.]+)"') == [min(minor(row[1]) for row in rows())]


def test_the_lowest_torch_is_the_lowest_that_ran_the_whole_suite() -> None:
    assert claimed(r'"torch>=([\d.]+)"') == [min(minor(row[2]) for row in rows() if WHOLE in row[3])]


def test_the_classifiers_are_the_pythons_that_were_run() -> None:
    ran = sorted({minor(row[1]) for row in rows()})
    assert claimed(r"Programming Language :: Python :: (\d+\.\d+)") == ran


def test_whole_means_without_failures() -> None:
    assert not [row for row in rows() if WHOLE in row[3] and "failed" in row[4]]


def test_tests_that_the_page_names_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = re.findall(r"`(test_\w+)", PAGE)
    assert names
    assert not [name for name in names if f"def {name}(" not in sources]


def test_what_needs_torch_exists() -> None:
    """A renamed file would be run without torch, or no longer be left out."""
    paths = [*versions.NEED_TORCH, *versions.FOLDERS, versions.ONE_TEST.partition("::")[0]]
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_a_row_is_made_from_what_pytest_prints() -> None:
    row = versions.row("1 failed, 739 passed, 2 skipped, 1 deselected in 42.44s\n")
    assert row.endswith("| 1 failed, 739 passed, 2 skipped |")
    assert row.count("|") == 6
