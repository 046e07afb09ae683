"""The state of a training comes back in memory: with faults the result is, bit for bit, that without them."""

from __future__ import annotations

import datetime
import signal

import pytest

from inprocess.testing.coordinates import When
from tests.harness import At, Hang, Kill, Raise

from . import checks, learning

SHARDED = {"live": {"copy_every": 2, "replica_distance": 1}}


@pytest.fixture(scope="module")
def calm():
    """What a run without faults comes to, by target; made once."""
    return {}


def dies_while_all_are_at(victim, place):
    """Otherwise another one may still be a step behind, or ahead, and then others send and receive."""
    others = {At(rank, step=place): Hang() for rank in range(3) if rank != victim}
    return {At(victim, step=place): Kill(when=When("fault", 2)), **others}


def result_of(launch, calm, target, **options):
    """Of a run with faults; and whether it is that of one without."""
    if target not in calm:
        ranks = launch(target, 3, args=options.get("args")).wait()
        calm[target] = {tuple(rank.value[:3]) for rank in ranks}
        assert len(calm[target]) == 1
    ranks = launch(target, 3, **options).wait()
    finished = [rank.value for rank in ranks if rank.value is not None]
    assert {tuple(value[:3]) for value in finished} == calm[target], ranks.exceptions
    assert len(finished) == 3
    return ranks


@pytest.mark.parametrize("place", ["before 3", "summed 3", "after 3"])
def test_replicated_one_raises(launch, calm, place):
    """Some may be a step ahead: they send the rest theirs."""
    ranks = result_of(launch, calm, learning.run_replicated, faults={At(1, step=place): Raise()})
    assert any(rank.value[3][1] == "own memory" for rank in ranks)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["before 3", "summed 3", "inside 3", "after 3"])
def test_replicated_one_dies_and_is_replaced(launch, calm, place, victim):
    faults = {At(victim, step=place): Kill()}
    ranks = result_of(launch, calm, learning.run_replicated, faults=faults, respawn=1)
    checks.died(ranks, {victim: -signal.SIGKILL})
    assert ranks[3].value[3][0].startswith("rank ")


def test_replicated_torn(launch, calm):
    """It raises in the middle of the optimizer's step, and gets the state of one that came through."""
    faults = {At(1, step="inside 3"): Raise()}
    ranks = result_of(launch, calm, learning.run_replicated, faults=faults)
    assert ranks[1].value[3][1].startswith("rank ")


def test_a_rank_comes_back_from_reserve_with_a_step_that_the_others_did_again(launch):
    """Rank 2 alone finishes step 1, and waits while the others do it again, as two: it has another step 2 than they."""
    faults = {
        At(2, 0, step="after 1"): Hang(),
        At(1, 0, step="summed 1"): Hang(),
        At(0, 0, step="summed 1"): Raise(when=When("fault", 2)),
        At(1, 1, step="summed 2"): Hang(),
        At(0, 1, step="summed 2"): Raise(),
    }
    ranks = launch(learning.run_replicated_with_a_reserve, 3, faults=faults).wait()
    assert len({tuple(rank.value[:3]) for rank in ranks}) == 1
    assert ranks[2].value[3][-1].startswith("rank ")
    assert [ranks[rank].value[3][-1] for rank in (0, 1)] == ["own memory"] * 2
    assert not any("is not the same on all ranks" in rank.log for rank in ranks)


def test_replicated_two_die_in_turn(launch, calm):
    faults = {At(1, step="before 2"): Kill(), **{At(2, i, step="before 4"): Kill() for i in range(1, 5)}}
    ranks = result_of(launch, calm, learning.run_replicated, faults=faults, respawn=2)
    checks.died(ranks, {1: -signal.SIGKILL, 2: -signal.SIGKILL})


def test_replicated_the_sender_dies(launch, calm):
    """Another one takes over. With the replacement there may be an iteration in between."""
    faults = {**dies_while_all_are_at(1, "before 3"), **{At(0, i, step="send"): Kill() for i in range(1, 4)}}
    ranks = result_of(launch, calm, learning.run_replicated, faults=faults, respawn=2)
    checks.died(ranks, {0: -signal.SIGKILL, 1: -signal.SIGKILL})


def test_replicated_the_receiver_raises(launch, calm):
    faults = {At(1, step="inside 3"): Raise(), At(1, 1, step="receive"): Raise()}
    result_of(launch, calm, learning.run_replicated, faults=faults)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("raising", [[1], [0, 1, 2]])
def test_between_micro_batches_some_raise(launch, calm, step, raising):
    """In the first step after `recover` DistributedDataParallel has just written to the parameters; and gradients that
    were accumulated must not come into the step that is done again."""
    faults = {At(rank, step=f"micro {step}"): Raise() for rank in raising}
    result_of(launch, calm, learning.run_accumulating, faults=faults)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
def test_between_micro_batches_one_dies(launch, calm, step, victim):
    faults = {At(victim, step=f"micro {step}"): Kill()}
    ranks = result_of(launch, calm, learning.run_accumulating, faults=faults, respawn=1)
    checks.died(ranks, {victim: -signal.SIGKILL})


def test_a_second_fault_in_the_first_step_after_a_restart(launch, calm):
    faults = {At(1, step="micro 3"): Raise(), **{At(0, i, step="micro 3"): Kill() for i in range(1, 4)}}
    ranks = result_of(launch, calm, learning.run_accumulating, faults=faults, respawn=1)
    checks.died(ranks, {0: -signal.SIGKILL})


@pytest.mark.parametrize("early", [False, True])
def test_buffers_of_ddp_when_rank_0_is_replaced(launch, early):
    """DistributedDataParallel gives all ranks rank 0's buffers, but at the next forward pass: rank 0 took them along.
    Where they are given to all before `commit`, they are what they would have been; the weights are in both cases."""
    calm = [rank.value[:3] for rank in launch(learning.run_ddp, 3, args={"buffers": early}).wait()]
    faults = dies_while_all_are_at(0, "before 3")
    ranks = launch(learning.run_ddp, 3, args={"buffers": early}, faults=faults, respawn=1).wait()
    (_, *survivors, replacement) = [rank.value for rank in ranks]
    assert replacement[3] == ["rank 1"]
    found = [replacement[:3], *(value[:3] for value in survivors)]
    assert [value[:2] for value in found] == [value[:2] for value in calm]
    assert (found == calm) == early


OWN = {"apart": 100, "live": {"per_rank": ["position"]}}


@pytest.mark.parametrize("place", ["before 3", "summed 3", "inside 3", "after 3"])
def test_each_rank_keeps_its_own_position(launch, calm, place):
    """Also one that is a step behind the others: it has drawn what they had."""
    if "own" not in calm:
        calm["own"] = [rank.value[:3] for rank in launch(learning.run_replicated, 3, args=OWN).wait()]
        assert [value[2] for value in calm["own"]] == [6, 106, 206]
    ranks = launch(learning.run_replicated, 3, args=OWN, faults={At(1, step=place): Raise()}).wait()
    assert [rank.value[:3] for rank in ranks] == calm["own"]


def test_a_replaced_rank_has_no_position_of_its_own(launch):
    """And says so; the others keep theirs."""
    faults = dies_while_all_are_at(1, "before 3")
    ranks = launch(learning.run_replicated, 3, args=OWN, faults=faults, respawn=1).wait()
    assert "what position would be at step 3 is not known here" in ranks[3].log
    assert [ranks[rank].value[2] for rank in (0, 2)] == [6, 206]


def test_a_part_that_differs_is_named(launch):
    """A rank that is behind gets that of another one."""
    faults = {At(1, step="inside 3"): Raise()}
    ranks = launch(learning.run_replicated, 3, args={"apart": 100}, faults=faults).wait()
    assert "the part 'position' is not the same on all ranks at step" in ranks[0].log
    assert "per_rank=('position',)" in ranks[0].log


HTTP = {"live": {"transport": "http"}}


@pytest.mark.parametrize("fault", [None, Kill(), Raise()])
def test_over_http(launch, calm, fault):
    """One dies and is replaced; with the fault, the one that sends fails in the middle, and another one takes over."""
    sending = {At(0, i, step="send"): fault for i in range(1, 4) if fault}
    faults = {**dies_while_all_are_at(1, "before 3"), **sending}
    ranks = result_of(launch, calm, learning.run_replicated, faults=faults, args=HTTP, respawn=2)
    checks.died(ranks, {1: -signal.SIGKILL})


def test_over_http_the_receiver_raises(launch, calm):
    faults = {At(1, step="inside 3"): Raise(), At(1, 1, step="receive"): Raise()}
    result_of(launch, calm, learning.run_replicated, faults=faults, args=HTTP)


def test_replicated_all_are_torn(launch):
    """Everybody leaves, and nobody goes on with what is left: whoever says so first takes the others along."""
    faults = {At(rank, step="inside 3"): Raise(when=When("wait_for", 2)) for rank in range(3)}
    ranks = launch(learning.run_replicated, 3, faults=faults).wait()
    assert "StateLost" in {rank.exception for rank in ranks} <= {"StateLost", "RestartAbort"}
    assert all("the states of all ranks are torn" in rank.message for rank in ranks)


def test_replicated_all_are_torn_with_a_copy(launch, calm):
    faults = {At(rank, step="inside 3"): Raise(when=When("wait_for", 2)) for rank in range(3)}
    args = {"live": {"copy_every": 2}}
    ranks = result_of(launch, calm, learning.run_replicated, faults=faults, args=args)
    assert [rank.value[3][1] for rank in ranks] == ["own copy"] * 3


@pytest.mark.parametrize("place", ["summed 3", "inside 3", "before 5"])
def test_sharded_one_raises(launch, calm, place):
    result_of(launch, calm, learning.run_sharded, faults={At(1, step=place): Raise()}, args=SHARDED)


def test_sharded_ranks_are_numbered_anew(launch, calm):
    """Each process has another shard afterwards: they exchange what they have."""
    hold = {At(rank, step="summed 3"): Hang() for rank in (0, 2)}  # nobody is a step ahead
    options = {"faults": {At(1, step="summed 3"): Raise(), **hold}, "args": {"live": {}}}
    calm["rotating"] = {tuple(rank.value[:3]) for rank in launch(learning.run_sharded, 3, args=options["args"]).wait()}
    ranks = launch(learning.run_sharded_rotating, 3, **options).wait()
    assert {tuple(rank.value[:3]) for rank in ranks} == calm["rotating"], ranks.exceptions
    assert sorted(rank.value[3][1] for rank in ranks) == ["rank 0 at 3", "rank 1 at 3", "rank 2 at 3"]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", ["summed 3", "before 5"])
def test_sharded_one_dies_and_is_replaced(launch, calm, place, victim):
    """What it had is a copy on the next rank."""
    faults = {At(victim, step=place): Kill()}
    ranks = result_of(launch, calm, learning.run_sharded, faults=faults, args=SHARDED, respawn=1)
    assert f"a copy of rank {(victim + 1) % 3} at" in ranks[3].value[3][0]


def test_sharded_copies_by_time(launch, calm):
    """Here every step takes longer than that: so one is copied at each step, from the second one on."""
    args = {"live": {"copy_every": datetime.timedelta(microseconds=1), "replica_distance": 1}}
    ranks = result_of(launch, calm, learning.run_sharded, faults={At(0, step="summed 5"): Kill()}, args=args, respawn=1)
    assert ranks[3].value[3][0] == "a copy of rank 1 at 5"


def test_sharded_it_dies_before_anything_is_kept(launch, calm):
    """So all begin again: their parts are new."""
    faults = {At(1, step="before 1"): Kill()}
    ranks = result_of(launch, calm, learning.run_sharded, faults=faults, args=SHARDED, respawn=1)
    assert ranks[0].value[3][-1] == "nowhere at 0"
