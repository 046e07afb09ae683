"""What `benchmarks.back_to_training` makes of the marks of its ranks, and its table."""

from __future__ import annotations

from typing import Any

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


def test_each_row_is_measured_in_each_tree_and_torchrun_once() -> None:
    found = [*ruler.rows("cold", [HERE, "abc"])]
    assert found == [("cold", "kept", HERE), ("cold", "kept", "abc"), ("cold", "torchrun", HERE)]
    assert len([*ruler.rows("", [HERE])]) == len(ruler.ROWS)


def test_the_table() -> None:
    found = {
        ("raise", "kept", HERE): [restart(True, 20), restart(False, 10), restart(False, 12)],
        ("warm", "kept", "abc"): [restart(True, 30.4)],
        ("spare", "kept", HERE): [],
    }
    *_, first, later, other = ruler.table(found).splitlines()
    assert first == "| one rank raises, kept, first | 20 | 21 | 22 | 23 | 24 | 25 | 26 | 1 |"
    assert later == "| one rank raises, kept, later | 11 | 12 | 13 | 14 | 15 | 16 | 17 | 2 |"
    assert other == "| SIGKILL, a warm worker, kept, abc | 30 | 31 | 32 | 33 | 34 | 35 | 36 | 1 |"
