"""What `benchmarks.back_to_training` makes of the marks of its ranks, and its table."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import pytest

from benchmarks import back_to_training as ruler
from benchmarks.job import Mark
from benchmarks.training_report import HERE


def ends(iteration: int, size: int, *times: int) -> list[Mark]:
    """The second steps of some ranks."""
    return [Mark("next", rank, iteration, t, {"size": size}) for rank, t in enumerate(times)]


def restart(first: bool, entry: float) -> dict[str, Any]:
    return {"first": first, **{name: entry + number for number, name in enumerate(ruler.MOMENTS)}}


def test_everybody_trains_again_in_one_iteration_after_the_fault() -> None:
    before, alone, after = ends(0, 4, 1, 1, 1, 1), ends(1, 3, 11, 11, 12), ends(2, 4, 21, 22, 23, 24)
    assert ruler.trained([], 0, 4) is None
    assert ruler.trained(before, 0, 4) == 0
    assert ruler.trained(before, 5, 4) is None
    assert ruler.trained([*before, *alone, *after[:3]], 5, 4) is None
    assert ruler.trained([*before, *alone, *after], 5, 4) == 2
    assert ruler.trained([*before, *alone], 5, 3) == 1


def test_each_row_is_measured_in_each_tree_and_other_libraries_once() -> None:
    options = argparse.Namespace(fault="cold", program="")
    assert [*ruler.rows(options, [HERE, "abc"])] == [
        ("cold", "kept", "inprocess", HERE),
        ("cold", "kept", "inprocess", "abc"),
        ("cold", "fresh", "torchrun", HERE),
    ]
    assert len([*ruler.rows(argparse.Namespace(fault="", program=""), [HERE])]) == len(ruler.ROWS)
    chosen = ruler.rows(argparse.Namespace(fault="raise", program="lightning|fresh, torch"), [HERE])
    assert [row[1:3] for row in chosen] == [
        ("fresh", "torchrun"),
        ("lightning", "inprocess"),
        ("lightning", "torchrun"),
    ]


def test_rows_whose_libraries_are_not_installed_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"lightning": object()}.get)
    measured = ruler.chosen(argparse.Namespace(fault="raise", program="torchrun"), [HERE])
    assert [program for _, program, *_ in measured] == ["fresh", "lightning", "sharded"]
    assert capsys.readouterr().err == "left out: transformers, torchrun: not installed\n"


def test_every_row_names_a_program_and_every_program_is_there() -> None:
    assert {program for _, program, _ in ruler.ROWS} == {*ruler.PROGRAMS}
    for module, kind in ruler.PROGRAMS.values():
        assert issubclass(getattr(importlib.import_module(module), kind), ruler.Program)


def test_the_table() -> None:
    trainer = restart(True, 40)
    del trainer["group"]  # it makes its group by itself
    found = {
        ("raise", "kept", "inprocess", HERE): [restart(True, 20), restart(False, 10), restart(False, 12)],
        ("warm", "kept", "inprocess", "abc"): [restart(True, 30.4)],
        ("raise", "lightning", "torchrun", HERE): [trainer],
        ("spare", "kept", "inprocess", HERE): [],
    }
    *_, first, later, other, last = ruler.table(found).splitlines()
    assert first == "| one rank raises, kept, first | 20 | 21 | 22 | 23 | 24 | 25 | 26 | 1 |"
    assert later == "| one rank raises, kept, later | 11 | 12 | 13 | 14 | 15 | 16 | 17 | 2 |"
    assert other == "| SIGKILL, a warm worker, kept, abc | 30 | 31 | 32 | 33 | 34 | 35 | 36 | 1 |"
    assert last == "| one rank raises, lightning, torchrun | 40 |  | 42 | 43 | 44 | 45 | 46 | 1 |"
