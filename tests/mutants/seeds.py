"""Random jobs in the simulator against the mutants marked ``seeds``: `python -m tests.mutants.seeds`.

Prints how many jobs pass before the first that notices; no other test runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests import sim
from tests.mutants import Mutant, applied
from tests.mutants.catalog import MUTANTS

SEEDED = tuple(mutant for mutant in MUTANTS if mutant.seeds)


def survives(mutant: Mutant, seeds: Sequence[int]) -> tuple[int, str]:
    """How many seeds the mutant survives, and what catches it (empty: nothing)."""
    with applied(mutant):
        for count, seed in enumerate(seeds):
            try:
                sim.run(sim.random_scenario(seed))
            except sim.Failure as failure:
                return count, f"{type(failure.__cause__).__name__}: {failure.__cause__}"
    return len(seeds), ""


if __name__ == "__main__":
    for each in SEEDED:
        number, why = survives(each, range(500))
        print(f"{each.name:24} {number:4}  {(why or 'SURVIVED')[:100]}")
