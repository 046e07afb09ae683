"""A quick slice of the torture (`nox -s torture`): fixed seeds, and every placement there is."""

from __future__ import annotations

import pytest

from tests.torture.engine import Counts, Torture, watched
from tests.torture.placements import everywhere
from tests.torture.shapes import SHAPES

CHEAP = [name for name, shape in SHAPES.items() if shape.cheap]


@pytest.mark.parametrize("name", CHEAP)
def test_interruption_at_every_instruction(name: str) -> None:
    problems: list[str] = []
    with watched(problems, Counts()):
        assert everywhere(SHAPES[name]) > 50  # Python 3.13 has 99 for the shortest
    assert not problems


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("seed", [1, 2])
def test_interruptions_at_any_moment(seed: int) -> None:
    with Torture(seed) as torture:
        torture.batch(storm=True, windows=5000)
        torture.batch(storm=False, windows=100)
    print(f"{torture.windows} windows, {torture.under_way.total()} interrupted")
    assert torture.under_way.total() > 50
