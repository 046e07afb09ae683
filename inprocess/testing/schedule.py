"""Faults at random moments, from a seed that is printed and plays them again."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

from inprocess.exception import OptionError
from inprocess.testing.coordinates import At
from inprocess.testing.faults import Exit, Fault, Kill, Raise, Segfault, SlowDown

__all__ = ["random_faults"]

#: what strikes where nothing else is said: nothing that waits for a timeout, or for the end of a step as SIGTERM does
KINDS: tuple[Fault, ...] = (Raise(), Raise(OSError), Kill(), Exit(), Segfault())


def random_faults(
    seed: int | None = None, n: int = 3, *, ranks: int = 4, steps: int = 10, kinds: Sequence[Fault] = KINDS
) -> dict[At, Fault]:
    """A schedule of ``n`` faults, one in each of the first iterations, on a random rank at a random step.

    Which ones is printed, so a failing test shows it. No more than ``ranks - 1`` ranks lose their process by it.

    Args:
        seed: the same seed, with the same other arguments, makes the same schedule. None: a new one each time.
        n: number of faults.
        ranks: of the job.
        steps: faults strike at steps below it, so every iteration has to have as many.
        kinds: of which they are; the usual ones begin the next iteration at once. With `Terminate` that takes up to a
            second, which the function has to last.

    Raises OptionError where ``n``, ``ranks`` or ``steps`` is not positive, or ``kinds`` is empty or has a fault that
    restarts nobody.
    """
    for name, value in (("n", n), ("ranks", ranks), ("steps", steps)):
        if value < 1:
            raise OptionError(f"random_faults: {name}={value!r} must be at least 1")
    if not kinds:
        raise OptionError("random_faults: kinds is empty; leave it out for the usual ones")
    if gentle := [kind for kind in kinds if isinstance(kind, SlowDown)]:
        raise OptionError(f"random_faults: {gentle[0]} restarts nobody; each kind has to begin the next iteration")
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    chance, alive = random.Random(seed), list(range(ranks))
    found: dict[At, Fault] = {}
    for iteration in range(n):
        fault = chance.choice([kind for kind in kinds if len(alive) > 1 or not kind.ends] or [Raise()])
        rank = chance.choice(alive)
        if fault.ends:
            alive.remove(rank)
        found[At(rank, step=chance.randrange(steps), iteration=iteration)] = fault
    print(f"random_faults(seed={seed}, n={n}, ranks={ranks}, steps={steps}):")
    for at, fault in found.items():
        print(f"  {at}: {fault}")
    return found
