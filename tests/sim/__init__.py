"""The simulator: the real protocol code over a simulated store, in virtual time, with kills at any store operation.

``run`` plays one scenario; on failure the error carries the story and the command that plays it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.sim.scenario import Scenario, random_scenario
from tests.sim.world import World

__all__ = ["Failure", "Scenario", "random_scenario", "run", "soak"]


class Failure(AssertionError):
    """An invariant broke, or the protocol raised: seed, story, and how to play it again."""


def run(scenario: Scenario, max_time: float = 400.0) -> World:
    """Play a scenario. Raises Failure with the story."""
    world = World(scenario, max_time)
    try:
        world.run()
    except Exception as error:
        raise Failure(f"{story(world)}\n{type(error).__name__}: {error}\n{_replay(scenario)}") from error
    return world


def story(world: World) -> str:
    """All that happened, one line each."""
    lines = [f"{when:10.4f}  {who:10}  {what}" for when, who, what in world.engine.trace]
    return "\n".join([f"seed {world.scenario.seed}: {world.scenario}", *lines])


def _replay(scenario: Scenario) -> str:
    command = f"python -m tests.sim {scenario.seed} --members {scenario.members} --faults {len(scenario.faults)}"
    if scenario == random_scenario(scenario.seed, scenario.members, len(scenario.faults)):
        return f"play it again: {command}"
    return f"play it again: tests.sim.run({scenario!r})"


def soak(seeds: Iterable[int], members: int = 4, faults: int = 3) -> int:
    """Play the random scenario of each seed; answers how many. Raises Failure at the first that breaks."""
    count = 0
    for seed in seeds:
        run(random_scenario(seed, members, faults))
        count += 1
    return count
