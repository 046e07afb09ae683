"""torch (2.13) reads the ranks of a default group where it has left them out, unless it is a process's first group."""

from __future__ import annotations

from tests.harness import At, Raise

from . import splitting


def test_the_default_group_is_split_after_a_restart(launch):
    """Before it is the process's second: then the rank gets SIGSEGV. One rank: between more a split of Gloo's hangs at
    times, also without this library.
    """
    (rank,) = launch(splitting.run, 1, faults={At(0, step="fault", iteration=0): Raise()}).wait(20)
    assert rank.value == [1, 1]
