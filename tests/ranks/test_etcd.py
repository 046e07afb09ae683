"""Ranks that agree through etcd: no rank serves the store, so any of them may die with its host."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from inprocess.store import EtcdStore
from tests.harness import At, HostLoss, Kill, KillTogether, Raise, Ranks, Run, When
from tests.harness.etcd import ETCD, MISSING, EtcdCluster
from tests.harness.launch import BEATING, PATIENT

from . import checks, targets

pytestmark = pytest.mark.skipif(not ETCD, reason=MISSING)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture
def own_cluster(tmp_path, request: pytest.FixtureRequest) -> Iterator[EtcdCluster]:
    """One that the test may break; its parameter is the number of members."""
    cluster = EtcdCluster(tmp_path, getattr(request, "param", 1))
    yield cluster
    cluster.close()


def through(cluster: EtcdCluster, name: str, options: Any = PATIENT, **more: Any) -> dict[str, Any]:
    kwargs = {"endpoints": cluster.endpoints, "namespace": name, "ttl": 10} | more
    return dict(options) | {"store_factory": EtcdStore, "store_kwargs": kwargs}


def tell(run: Run, rank: int) -> None:
    """What a fault waits for that has `When("told", 1)`."""
    run.wait_event("wait_for")
    waits = [event["number"] for event in run.ranks[rank].events if event["event"] == "wait_for"]
    os.write(run.ranks[rank].control.fileno(), bytes([waits[-1]]))


def keys(cluster: EtcdCluster, name: str) -> int:
    """How many keys there are of a job of the harness."""
    return len(EtcdStore(cluster.endpoints, name)._cluster.below(f"{name}/"))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_lost_with_its_monitor(launch, cluster, victim):
    wrapper = through(cluster, f"host{victim}", BEATING)
    faults = {At(victim, step=1): HostLoss()}
    ranks = launch(targets.run_train, 3, faults=faults, wrapper=wrapper, args={"full_exit": True}).wait()
    checks.died(ranks, {victim: -signal.SIGKILL})
    checks.went_on(ranks, without=[victim])


def test_a_rank_is_killed_and_the_job_leaves_no_keys(launch, cluster):
    """The last to leave speaks for the dead, so a next job of that name need not wait until the keys expire."""
    ranks = launch(targets.run_train, 3, faults={At(0, step=1): Kill()}, wrapper=through(cluster, "killed")).wait()
    checks.went_on(ranks, without=[0])
    assert keys(cluster, "killed") == 0


def test_a_rank_raises(launch, cluster):
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): Raise()}, wrapper=through(cluster, "raise")).wait()
    checks.went_on(ranks)


def test_a_next_job_of_the_same_name(launch, cluster):
    """The first one is lost whole, so that nobody tidied up: its keys do not disturb the second, which waits for
    their end."""
    wrapper = through(cluster, "again", ttl=3)
    first = launch(
        targets.run_blocked,
        2,
        args={"place": "sleep", "victims": [0]},
        wrapper=wrapper | {},
        faults={
            At(0, step="fault"): HostLoss(when=When("blocked", 1)),
        },
    )
    first.wait_event("ended")
    first.close()
    second = launch(targets.run_train, 2, wrapper=wrapper).wait()
    checks.went_on(second, iteration=0)


def test_the_loss_of_the_server_is_a_clear_error_on_every_rank(launch, own_cluster):
    """Beyond ``patience``, which is below the time after which a rank that cannot be heard is stopped."""
    wrapper = through(own_cluster, "lost", patience=1.0)
    run = launch(targets.run_alone, 3, wrapper=wrapper, args={"steps": 10**9})
    run.wait_event("enter", count=3)
    own_cluster.kill()
    ranks = run.wait(40)
    checks.failed(ranks, dict.fromkeys(range(3), "StoreLost"))
    assert all("no endpoint of etcd answers" in rank.message for rank in ranks), ranks[0].message
    assert all("within 1 s (patience)" in rank.message for rank in ranks), ranks[0].message


@pytest.mark.parametrize("own_cluster", [1, 3], indirect=True)
@pytest.mark.parametrize("fault", [Raise, Kill])
def test_etcd_starts_again_within_patience(launch, own_cluster, fault):
    """All its members. A rank fails meanwhile, and the others wait; heartbeats come late, but in time.

    Some ten connections of three ranks try again, so each has done so several times.
    """
    faults = {At(1, step=1): fault(when=When("told", 1))}
    wrapper = through(own_cluster, "again", ttl=60, patience=25)
    run = launch(targets.run_train, 3, faults=faults, wrapper=wrapper)
    run.wait_event("wait_for")
    own_cluster.kill_all()
    tell(run, 1)
    own_cluster.turn_away(80)
    own_cluster.start_all()
    ranks = run.wait(40)
    checks.went_on(ranks, without=[1] if fault is Kill else [])
    assert keys(own_cluster, "again") == 0


@pytest.mark.parametrize("own_cluster", [3], indirect=True)
def test_the_job_survives_the_loss_of_a_member_of_the_cluster(launch, own_cluster):
    """Whichever member has the leader; then a rank dies with its host. Heartbeats have to outlast an election."""
    options = BEATING | {"heartbeat_timeout": 8}
    faults = {At(0, step=1): HostLoss(when=When("told", 1))}
    run = launch(targets.run_train, 3, faults=faults, wrapper=through(own_cluster, "member", options))
    run.wait_event("wait_for")
    own_cluster.kill(0)
    tell(run, 0)
    ranks = run.wait(40)
    checks.died(ranks, {0: -signal.SIGKILL})
    checks.went_on(ranks, without=[0])


def test_ranks_that_are_missing_are_named(launch, cluster):
    wrapper = through(cluster, "missing", targets.IMPATIENT, ttl=3)
    ranks = launch(targets.run_train, 1, env={"WORLD_SIZE": "3"}, wrapper=wrapper).wait()
    checks.failed(ranks, {0: "TimeoutError"})
    assert "initial ranks [1, 2] have not come" in ranks[0].message


def test_a_second_job_of_the_same_name_is_refused(launch, cluster):
    """As it is over a TCPStore where the ports are the same: at the next heartbeat of the first."""
    wrapper = through(cluster, "used")
    first = launch(
        targets.run_blocked,
        2,
        args={"place": "sleep", "victims": [0]},
        wrapper=wrapper,
        faults={At(0, step="fault"): Raise(when=When("told", 1))},
    )
    first.wait_event("blocked")
    second = launch(targets.run_full, 2, wrapper=wrapper).wait(check=False)
    assert second.exceptions == ["OptionError"] * 2
    assert all("has no part in it" in rank.message for rank in second)
    tell(first, 0)
    checks.went_on(first.wait())
    assert keys(cluster, "used") == 0


# --- processes that are started while the job runs ----------------------------------------------------------------


def everybody_is_back(ranks: Ranks, cluster: EtcdCluster, name: str, without: Collection[int] = ()) -> None:
    """All processes but those finished in one iteration, each with its RANK, and the last one deleted the keys."""
    stayed = [result for number, result in enumerate(ranks) if number not in without]
    (iteration,) = {result.value[0] for result in stayed}
    size = len(stayed)
    assert sorted(result.value for result in stayed) == [[iteration, place, size] for place in range(size)]
    assert all(result.value[1] == result.rank for result in stayed)
    assert [result.exitcode for result in stayed] == [0] * size
    assert keys(cluster, name) == 0


def test_one_dies_and_is_replaced(launch, cluster):
    wrapper = through(cluster, "replaced", BEATING)
    ranks = launch(targets.run_full, 3, faults={At(1, step=1): Kill()}, wrapper=wrapper, respawn=1).wait()
    everybody_is_back(ranks, cluster, "replaced", without=[1])


def test_rank_0_is_lost_with_its_monitor_and_is_replaced(launch, cluster):
    wrapper, faults = through(cluster, "host", BEATING), {At(0, step=1): HostLoss()}
    ranks = launch(targets.run_full, 3, faults=faults, wrapper=wrapper, args={"restarts": 1}, respawn=1).wait()
    checks.died(ranks, {0: -signal.SIGKILL})
    everybody_is_back(ranks, cluster, "host", without=[0])


def test_only_those_that_joined_are_left(launch, cluster):
    """One after the other; they take part in the next call too, and tidy up. The first may come in time for the restart
    that the death begins."""
    faults = {At(0, step=1): Kill(), At(1, None, step=1): Kill(when=When("enter", 2))}
    wrapper, args = through(cluster, "others", BEATING), {"restarts": 2}
    ranks = launch(targets.run_full_twice, 2, faults=faults, wrapper=wrapper, args=args, respawn=2).wait()
    assert [result.value[1] for result in ranks[2:]] == [[0, 0, 2], [0, 1, 2]]
    assert ranks.exitcodes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert keys(cluster, "others") == 0


def test_a_spare_takes_the_slot_of_the_next_that_dies(launch, cluster):
    """It waits, whatever place it was started for. Nobody says that it replaces one, but the job has a name."""
    faults = {At(2, step=50): Kill(when=When("waits", 1))}
    wrapper, named = through(cluster, "spare", BEATING), {"INPROCESS_JOB": "the training"}
    run = launch(targets.run_full, 3, faults=faults, wrapper=wrapper, args={"restarts": 1}, env=named)
    run.wait_event("enter", count=3)
    run.start_another(0, env={"INPROCESS_RESTART": "0"})
    ranks = run.wait()
    assert sorted(ranks[number].value for number in (0, 1, 3)) == [[1, 0, 3], [1, 1, 3], [1, 2, 3]]
    assert ranks[3].value == [1, 2, 3]
    assert keys(cluster, "spare") == 0


def test_the_job_grows(launch, cluster):
    """And goes on so in the next call."""
    wrapper, args = through(cluster, "grows", BEATING), {"world_size": 3, "restarts": 1}
    run = launch(targets.run_full_twice, 2, wrapper=wrapper, args=args)
    run.wait_event("enter", count=2)
    run.start_another(2, env={"INPROCESS_GROW": "1", "INPROCESS_RESTART": "0", "WORLD_SIZE": "3"})
    ranks = run.wait()
    assert [result.value[1] for result in ranks] == [[0, 0, 3], [0, 1, 3], [0, 2, 3]]
    assert keys(cluster, "grows") == 0


def test_it_joins_in_a_later_call(launch, cluster):
    """The calls before are over for it, so they return None."""
    wrapper, faults = through(cluster, "later", BEATING), {At(1, 0, step=1, call=1): Kill()}
    ranks = launch(targets.run_full_at_last, 2, faults=faults, wrapper=wrapper, args={"restarts": 1}, respawn=1).wait()
    iteration = ranks[0].value[1][0]
    assert [ranks[number].value for number in (0, 2)] == [[[0, 0, 2], [iteration, 0, 2]], [None, [iteration, 1, 2]]]
    assert keys(cluster, "later") == 0


def test_all_that_began_are_lost_and_spares_take_over(launch, cluster):
    """Their monitors notice it, and speak for the dead."""
    faults = {At(rank, step=50): KillTogether(2, hosts=True, when=When("waits", 2)) for rank in (0, 1)}
    wrapper, args = through(cluster, "all", BEATING), {"restarts": 1}
    run = launch(targets.run_full, 2, faults=faults, wrapper=wrapper, args=args)
    run.wait_event("enter", count=2)
    run.start_another(0)
    run.start_another(1)
    everybody_is_back(run.wait(), cluster, "all", without=[0, 1])
