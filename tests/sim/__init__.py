"""The simulator: the real protocol code over a simulated store, in virtual time, with kills at any store operation.

``run`` plays one scenario; on failure the error carries the story and the command that plays it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.sim.minimize import minimize
from tests.sim.scenario import Scenario, random_scenario
from tests.sim.world import World

__all__ = ["Failure", "Scenario", "random_scenario", "run", "seeds", "soak", "story"]


class Failure(AssertionError):
    """An invariant broke, or the protocol raised: seed, story, and how to play it again."""


def run(scenario: Scenario, max_time: float = 400.0) -> World:
    """Play a scenario. Raises Failure with the story."""
    world = World(scenario, max_time)
    try:
        world.run()
    except Exception as error:
        raise Failure(f"{story(world)}\n{_in_words(error)}\n{_replay(scenario)}") from error
    return world


def story(world: World) -> str:
    """All that happened, one line each."""
    lines = [f"{when:10.4f}  {who:10}  {what}" for when, who, what in world.engine.trace]
    return "\n".join([f"seed {world.scenario.seed}: {world.scenario}", *lines])


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _replay(scenario: Scenario) -> str:
    command = f"python -m tests.sim {scenario.seed} --members {scenario.members} --faults {len(scenario.faults)}"
    if scenario == random_scenario(scenario.seed, scenario.members, len(scenario.faults)):
        return f"play it again: {command}"
    return f"play it again: tests.sim.run({scenario!r})"


def soak(scenarios: Iterable[Scenario]) -> int:
    """Play all of them; answers how many. Raises Failure at the first that breaks, made as small as it gets."""
    count = 0
    for scenario in scenarios:
        try:
            run(scenario)
        except Failure as failure:
            raise _minimized(scenario, failure) from failure.__cause__
        count += 1
    return count


def seeds(numbers: Iterable[int], members: int = 4, faults: int = 3) -> Iterator[Scenario]:
    """The random scenarios of some seeds."""
    return (random_scenario(seed, members, faults) for seed in numbers)


def _minimized(scenario: Scenario, failure: Failure) -> Failure:
    """The smallest failure of the same kind, and where it came from."""
    smallest = failure

    def fails(smaller: Scenario) -> bool:
        nonlocal smallest
        try:
            run(smaller)
        except Failure as found:
            if _kind(found) == _kind(failure):
                smallest = found
                return True
        return False

    minimize(scenario, fails)
    return Failure(f"{smallest}\nfirst seen as: {_in_words(failure.__cause__ or failure)}\n{_replay(scenario)}")


def _kind(failure: Failure) -> str:
    """The exception and the invariant that it names."""
    return _in_words(failure.__cause__ or failure)[:12]
