"""Several calls and functions in one process, limits, ways to get the call object, and misuse that is told at once."""

from __future__ import annotations

import contextlib

import pytest

from inprocess.exception import RestartAbort
from inprocess.launcher.control import ControlServer
from inprocess.stores import serving
from tests.harness import At, Kill, Raise, When

from . import checks, targets


def test_several_calls_and_functions(launch):
    """Also after a call in which there were restarts, and on ranks that were inactive in the call before."""
    faults = {At(1, call=0, step=1): Raise(), At(0, call=2, iteration=0, step=1): Raise()}
    ranks = launch(targets.run_several, 3, faults=faults).wait()
    assert ranks.exceptions == [None] * 3
    assert ranks.values == [[[1, n, 3], [0, n, 2] if n < 2 else None, [1, n, 3], [0, n, 3]] for n in range(3)]


def test_calls_go_on_with_the_survivors(launch):
    ranks = launch(targets.run_twice, 3, faults={At(0, call=0, step=1): Kill()}).wait()
    assert [rank.exception for rank in ranks[1:]] == [None, None]
    assert [rank.value for rank in ranks[1:]] == [[[1, 0, 2], [0, 0, 2]], [[1, 1, 2], [0, 1, 2]]]


def test_a_call_after_a_failed_call(launch):
    """All ranks leave together and still know each other; leaving one by one, the last ones would know fewer."""
    faults = {At(1, 0, "initialize"): Raise(RestartAbort)}
    ranks = launch(targets.run_again_after_failure, 2, faults=faults).wait()
    assert ranks.values == [["RestartAbort", [0, 0, 2]], ["RestartAbort", [0, 1, 2]]]


def test_retry_controller_counts_iterations(launch):
    faults = {At(0, iteration=n, step=0): Raise() for n in range(5)}
    ranks = launch(targets.run_train, 2, faults=faults, wrapper=targets.at_most_two_iterations).wait()
    checks.failed(ranks, {0: "RestartAbort", 1: "RestartAbort"})
    assert all("2" in rank.message and "max_iterations" in rank.message for rank in ranks)
    assert [len(rank.entries()) for rank in ranks] == [2, 2]


def test_retry_controller_wants_a_minimum_of_ranks(launch):
    ranks = launch(targets.run_train, 3, faults={At(1, step=1): Kill()}, wrapper=targets.at_least_three).wait()
    checks.failed(ranks, {0: "RestartAbort", 2: "RestartAbort"})
    assert all("3" in ranks[n].message and "2" in ranks[n].message for n in (0, 2))


def test_disabled_wrapper_returns_the_function_itself(launch):
    assert launch(targets.run_disabled, 1).wait().values == [True]


@pytest.mark.parametrize("target", [targets.run_disabled_inside, targets.run_disabled_around])
def test_disabled_and_not_inside_one_another(launch, target):
    """Whichever is the inner one is current, also in an iteration after one that was left by an error."""
    ranks = launch(target, 2, faults={At(1, step="inner"): Raise()}).wait()
    assert ranks.values == [[True] * 4] * 2


def test_every_way_to_get_the_call(launch):
    (rank,) = launch(targets.run_injected, 1).wait()
    assert rank.exception is None, rank.trace
    assert set(rank.value.values()) == {"CallWrapper"}, rank.value


def test_current_call_and_store(launch):
    ranks = launch(targets.run_store, 2).wait()
    assert ranks.values == [["1", True, None], ["0", True, None]]


def test_store_after_a_restart(launch):
    """Each iteration has an empty store of its own."""
    ranks = launch(targets.run_store, 2, faults={At(1, step="used"): Raise()}).wait()
    assert ranks.values == [["1", True, None], ["0", True, None]]


def test_hooks_of_torch_do_not_pile_up(launch):
    """init_process_group() puts a hook around the last one, each time."""
    ranks = launch(targets.run_hooked, 2, faults={At(1, step=1): Raise()}).wait()
    names = [event["name"] for rank in ranks for event in rank.of("hook")]
    assert len(names) == 4
    assert len(set(names)) == 1


@pytest.mark.parametrize("name", ["short", "long"])
def test_restart_and_atomic(launch, name):
    """A restart waits for the end of an atomic block, and the block is never cut in half."""
    ranks = launch(
        targets.run_atomic, 2, args={"style": name}, faults={At(1, step="fault"): Raise(when=When("atomic_begin", 1))}
    ).wait()
    checks.went_on(ranks)
    assert [len(rank.of("atomic_begin")) for rank in ranks] == [len(rank.of("atomic_end")) for rank in ranks]


def test_misuse_is_told_at_once(launch):
    """Each line: what was done wrong, and words that the error must contain."""
    (rank,) = launch(targets.run_misuse, 1).wait(20)
    assert rank.exception is None, rank.trace
    wrong = {name: text for name, text in rank.value.items() if not all(word in text for word in targets.MISUSE[name])}
    assert not wrong, wrong
    assert rank.value.keys() == targets.MISUSE.keys()


@pytest.mark.parametrize("ranks", [1, 2])
def test_port_in_use(launch, ranks):
    """Something else listens on MASTER_PORT: an error that names the variable and the port."""
    # a rank that stands still for 3 s while a busy machine starts the others is killed, which is another test's matter;
    # and the monitor looks for 2 s, after its start, whether it is the server of a job that is over
    wrapper = targets.IMPATIENT | {"soft_timeout": 8, "hard_timeout": 9, "barrier_timeout": 20}
    results = launch(targets.run_port_in_use, ranks, wrapper=wrapper).wait()
    assert "MASTER_PORT" in results[0].message, results[0].trace
    assert all(result.exception is not None for result in results)


def test_two_processes_with_the_same_rank(launch):
    ranks = launch(targets.run_train, 2, env={"RANK": "0"}, wrapper=targets.IMPATIENT).wait()
    assert any("RANK" in rank.message for rank in ranks), ranks.exceptions
    assert None not in ranks.exceptions


def test_ranks_agree_on_learned_timeouts(launch):
    """The longest of all, also of sections that only one has seen; a restart forgets nothing. A callback's section has
    soft_timeout at least, where less was learned."""
    ranks = launch(targets.run_agreeing, 3, faults={At(1, step="agreed"): Raise()}).wait()
    assert ranks.exceptions == [None] * 3
    assert ranks.values[0] == ranks.values[1] == ranks.values[2]
    seen = ranks.values[0]["sections"]
    assert ranks.values[0]["limit of a callback"] > 5 * 2.0
    assert list(seen["save"]) == [3, 12.0]
    assert sorted(name.rstrip(".") for name in seen) == ["only on 0", "only on 1", "only on 2", "save"]


def test_a_call_announces_itself_to_the_launcher(launch):
    """And one whose launcher is gone does not mind."""
    server = ControlServer()
    with contextlib.closing(server):
        environ = server.environment(0)
        ranks = launch(targets.run_train, 1, env=environ).wait()
        assert server.is_wrapped(0)
    assert ranks.exceptions == launch(targets.run_train, 1, env=environ).wait().exceptions == [None]


def test_a_call_that_did_not_begin_is_made_again(launch):
    """The name of the store's host was not known yet on one rank. The other one waits for it in the first call."""
    server = serving.serve("127.0.0.1", 0)
    env = {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = launch(targets.run_again_when_the_name_is_known, 2, env=env).wait(check=False)
    first, second = ranks
    # the harness counts calls that were made, not calls that began
    assert all("completed without all ranks" in problem for problem in ranks.problems), ranks.problems
    assert [first.value[1], second.value[1]] == [[0, 0, 2], [0, 1, 2]]
    kind, message = second.value[0]
    assert kind == "TimeoutError" and "MASTER_ADDR='late.invalid' does not resolve" in message
    del server
