"""State of torch's that outlives a restart: `docs/frameworks.md` has the table. One rank fails in its first iteration.

The ranks are programs, which may leave something behind: torch keeps a profiler's thread, and rpc's.
"""

from __future__ import annotations

import os

import pytest

from tests.harness import At, Kill, Raise, When

from . import torch_state


@pytest.mark.parametrize(
    ("what", "found"),
    [
        # as at the beginning, or of no consequence
        ("profiler", True),
        ("profiler_left_running", False),
        ("autocast", False),
        ("grad_mode", True),
        ("saved_tensors", False),
        ("library", True),
        ("attention", True),
        ("pipeline", True),
        # as the program has set it
        ("default_dtype", "torch.float64"),
        ("default_device", "meta"),
        ("deterministic", True),
        ("precision", "high"),
        ("module_hooks", 1),
    ],
)
def test_in_the_next_iteration(launch, what, found):
    faults = {At(0, step="fault", iteration=0): Raise()}
    (rank,) = launch(torch_state.run, 1, args={"what": what}, faults=faults, as_program=True).wait()
    assert rank.value == found


def test_a_profiler_of_the_program_around_the_calls_runs_on(launch):
    """It was switched off by a restart, and by the beginning of the second call."""
    (rank,) = launch(torch_state.profiled, 1, faults={At(0, step="fault"): Raise()}, as_program=True).wait()
    assert rank.value == 5


def test_context_parallelism_keeps_no_groups(launch):
    """Those of each iteration stayed: 5 descriptors."""
    faults = {At(0, step="fault", iteration=iteration): Raise() for iteration in range(4)}
    args = {"what": "attention"}
    (rank,) = launch(torch_state.run, 1, args=args, faults=faults, as_program=True).wait(30)
    counts = [event["count"] for event in rank.events if event["event"] == "descriptors"]
    assert counts[1] == counts[4], counts


def test_a_profiler_is_not_interrupted_while_it_ends_a_trace(launch):
    """Cut in half, it crashes the rank in one of the next iterations."""
    faults = {At(1, step="fault", iteration=0): Raise(when=When("ready", 1))}
    ranks = launch(torch_state.traced, 2, faults=faults, as_program=True).wait(30)
    assert [rank.value for rank in ranks] == [1, 1]
    (written,), (fault,) = ranks[0].of("written", iteration=0), ranks[1].of("fault")
    assert written["t"] > fault["t"]  # which struck while it was being written


def test_a_debug_server_that_the_function_starts(launch):
    """It was "already started" in the next iteration; and its page's process stayed."""
    faults = {At(1, step="fault", iteration=iteration): Raise() for iteration in range(2)}
    ranks = launch(torch_state.served, 2, faults=faults, as_program=True).wait(60)
    assert [rank.value for rank in ranks] == [[2, 200]] * 2
    pages = [event["page"] for event in ranks[0].of("served")]
    assert len(set(pages)) == 3 and not any(os.path.exists(f"/proc/{page}") for page in pages)


def test_rpc(launch):
    """Where ranks keep their numbers: "RPC is already initialized" otherwise."""
    faults = {At(1, step="fault", iteration=iteration): Raise() for iteration in (0, 1)}
    ranks = launch(torch_state.remote, 3, faults=faults, as_program=True).wait(30)
    assert [rank.value for rank in ranks] == [[2, 0, "1"], [2, 1, "2"], [2, 2, "0"]]


def test_rpc_with_a_spare_in_the_place_of_the_dead(launch):
    """It has made no agent before; the others have made one more."""
    faults = {At(1, step="fault", iteration=0): Raise(), At(1, step="fault", iteration=1): Kill()}
    ranks = launch(torch_state.remote, 3, faults=faults, wrapper=torch_state.spared, as_program=True).wait(30)
    assert [ranks[rank].value for rank in (0, 2)] == [[2, 0, "1"], [2, 1, "0"]]
