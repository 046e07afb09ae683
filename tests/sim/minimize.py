"""From a job that fails to the smallest one that still fails in the same way: what can be left out is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.sim.scenario import Scenario

#: seconds are rounded to one of these where that still fails
ROUND = (0.0, 0.1, 0.5, 1.0, 3.0, 9.0, 30.0)


def minimize(scenario: Scenario, fails: Callable[[Scenario], bool], most: int = 500) -> Scenario:
    """The smallest scenario found with at most that many tries."""
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(scenario):
            tries += 1
            if tries > most:
                return scenario
            if fails(smaller):
                scenario, progress = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """All that are one step simpler, the biggest steps first."""
    faults = scenario.faults
    for number in range(len(faults)):
        yield dataclasses.replace(scenario, faults=faults[:number] + faults[number + 1 :])
    last = scenario.members - 1
    if last and all(max(getattr(fault, "members", (getattr(fault, "member", 0),))) < last for fault in faults):
        slow = tuple(member for member in scenario.slow if member < last)
        yield dataclasses.replace(scenario, members=last, delays=scenario.delays[:last], slow=slow)
    plain = Scenario(scenario.seed)
    for name in ("assignment", "shared_host", "delays", "longest", "slow", "commits", "respawn", "join", "standbys"):
        if getattr(scenario, name) != getattr(plain, name):
            yield dataclasses.replace(scenario, **{name: getattr(plain, name)})
    for number, fault in enumerate(faults):
        for simpler in _simpler(fault):
            yield dataclasses.replace(scenario, faults=(*faults[:number], simpler, *faults[number + 1 :]))


def _simpler(fault: object) -> Iterator[object]:
    values = vars(fault)
    for name in ("time", "seconds"):
        for value in ROUND:
            if value < values.get(name, 0.0):
                yield dataclasses.replace(fault, **{name: value})  # type: ignore[type-var]
    if values.get("iteration", 0) > 0:
        yield dataclasses.replace(fault, iteration=values["iteration"] - 1)  # type: ignore[type-var]
    if values.get("target") == "host":
        yield dataclasses.replace(fault, target="training")  # type: ignore[type-var]
