"""Random jobs alone find each of these breakages: a simulator that finds nothing proves nothing."""

from __future__ import annotations

import pytest

from tests.mutants import Mutant
from tests.mutants.seeds import SEEDED, survives


@pytest.mark.parametrize("mutant", SEEDED, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    survived, why = survives(mutant, range(2500))  # most need a handful, two some hundred
    assert why, f"{survived} seeds found nothing wrong: {mutant.rule}"
