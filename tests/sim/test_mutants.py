"""The simulator finds each of the breakages in ``mutants``: a simulator that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim import mutants


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    survived, why = mutants.survives(mutant, range(2500))  # most need a handful, two some hundred
    assert why, f"{survived} seeds found nothing wrong: {mutant.__doc__}"
