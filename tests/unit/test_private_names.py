"""The private names of torch that the source uses are those of docs/versions.md, which says what happens without."""

from __future__ import annotations

from pathlib import Path

from tests import private_names
from tests.private_names import NAMES, OTHERS, PAGE, explained, names_in, new, of_torch, rewritten, stated, table, uses


def test_somebody_has_said_whose_each_name_is() -> None:
    found = uses()
    assert {name: found[name] for name in found.keys() - NAMES.keys() - OTHERS} == {}
    assert (NAMES.keys() | OTHERS) - found.keys() == set()  # no longer used


def test_the_page_has_them_all() -> None:
    """``python -m tests.private_names --write`` renews the table; what happens without them is written by hand."""
    page = PAGE.read_text()
    _, rows = table(page)
    assert {file: names_in(row[0]) for file, row in rows.items()} == of_torch()
    assert [file for file in rows if f"`{file}`" not in explained(page)] == []


def test_what_counts_as_a_name_of_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        '''
"""Prose with _in_prose."""
import torch._C
from torch._a import b
class Own:
    __slots__ = ("_slot",)
    def _method(self): self._field = getattr(torch, "_text", None)
    def other(self, group): return self._method, self._slot, group._attribute, torch.cuda._sleep, self._sleep
NAME = "torch._x:_y.clear"
SENTENCE = "not _this one"
def _sleep(): pass
'''
    )
    (tmp_path / "two.py").write_text("thing._field, __name__, _")
    found = uses(tmp_path)
    assert found.keys() == {"_C", "_a", "_text", "_attribute", "_sleep", "_x", "_y"}
    assert found["_sleep"] == {"one"}


def test_a_column_is_added(monkeypatch) -> None:
    names = {"a": {"_x", "_y"}, "b": {"_z"}}
    monkeypatch.setattr(private_names, "of_torch", lambda: names)
    page = f"before{private_names.BEGIN}\n{private_names.END}after"
    first = rewritten(page, "2.13.0", {"_y"})
    second = rewritten(first, "2.9.1", set())
    assert table(second) == (
        ["2.9.1", "2.13.0"],
        {"a": ["`_x`, `_y`", "all", "not `_y`"], "b": ["`_z`", "all", "all"]},
    )
    assert stated(second, "2.13.0") == {"_y"}
    assert stated(second, "2.15.0") == set()
    assert second.startswith("before") and second.endswith("after")
    names["a"].add("_w")  # so the other version has to be looked at again
    assert table(rewritten(second, "2.13.0", set()))[1]["a"] == ["`_w`, `_x`, `_y`", "", "all"]


def test_what_is_new() -> None:
    assert new({"class a.B", "table x"}, {"class a.C", "table x", "class a.A"}) == (
        "new: class (2)\n  a.A\n  a.C\ngone: class (1)\n  a.B"
    )
