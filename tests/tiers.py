"""Which tests run when: a plain ``python -m pytest`` takes minutes, ``--full`` runs them all.

A quick run has all of the folders below but for what takes long, and a choice of the tests with real ranks: one for
each kind of fault, join, hot spare, loss of the store's host, live state, launcher and example. A run that names files,
or chooses with ``-k`` or ``-m``, has what it names.

The ranks of most tests wait most of the time, so two tests run at a time where pytest-xdist is installed.
"""

from __future__ import annotations

import pytest

#: all of these is quick but for `SLOW`
FOLDERS = ("contracts", "sim", "threads", "unit")
SLOW = (
    "contracts/test_etcd_store.py",
    "sim/test_crashes.py",
    "sim/test_mutants.py",
    "sim/test_seeds.py::test_other_sizes",
    *(f"sim/test_seeds.py::test_seeds[{first}]" for first in (100, 200, 300, 400)),
    "threads/test_abort_gloo.py::test_fifty_cycles_leave_no_threads_and_descriptors",
    "threads/test_compiled_code.py",
    "threads/test_interrupt.py::test_a_hundred_thousand_windows",
    "threads/test_kept_loader.py::test_interrupted_while_workers_start",
    "threads/test_kept_loader.py::test_two_hundred_restarts_leave_nothing",
    "threads/test_kept_loader.py::test_without_the_guard_a_batch_is_lost",
    "threads/test_kept_loader.py::test_workers_of_a_fork_server_end_with_a_rank_that_is_killed",
    "threads/test_launcher_processes.py",
    "threads/test_leftovers.py",
    "threads/test_monitor_process.py",
    "threads/test_torture.py",
    "threads/test_versions.py::test_this_torch_has_what_the_page_says",
    "unit/test_digest.py::test_nothing_is_longer_than_it_may_be",
    "unit/test_light_torch.py",
    "unit/test_mutants.py",
)
#: and these of the other folders; each is one test, or one file
QUICK = (
    # an exception, and what the other ranks wait in
    "ranks/test_exceptions.py::test_without_a_fault_the_function_runs_once",
    "ranks/test_exceptions.py::test_one_rank_alone",
    "ranks/test_exceptions.py::test_one_raises[ValueError]",
    "ranks/test_exceptions.py::test_any_other_error_is_a_failure[cancel-CancelledError]",
    "ranks/test_blocked.py::test_released_when_one_raises[all_reduce]",
    "ranks/test_inherited.py::test_with_all_signals_blocked[sleep]",
    "ranks/test_blocked.py::test_released_when_one_raises[init]",
    "ranks/test_blocked.py::test_released_when_one_raises[new_group]",
    "ranks/test_blocked.py::test_released_when_one_raises[recv]",
    "ranks/test_blocked.py::test_released_when_one_raises[store_get]",
    "ranks/test_clean_ups.py::test_nobody_waits_for_soft_timeout",
    "ranks/test_swallowing.py::test_swallowed_interruptions_are_raised_again[1]",
    "ranks/test_repeats.py::test_the_job_ends_on_every_rank",
    "ranks/test_forks.py::test_a_child_that_leaves_the_function_ends[return]",
    # a death, a hang, a rank that leaves
    "ranks/test_blocked.py::test_released_when_one_dies[all_reduce]",
    "ranks/test_deaths.py::test_one_dies[kill-0]",
    "ranks/test_deaths.py::test_one_dies[segv-1]",
    "ranks/test_deaths.py::test_one_dies[exit0-1]",
    "ranks/test_hangs.py::test_hang_without_the_lock_restarts_all_and_kills_nobody[sleep]",
    "ranks/test_hangs.py::test_the_rank_that_does_not_answer_is_killed_and_only_it[gil-0]",
    "ranks/test_leaving.py::test_one_leaves[KeyboardInterrupt-1]",
    "ranks/test_preemption.py::test_one_leaves[0]",
    "ranks/test_completion.py::test_all_restart_when_one_dies_after_the_others_returned[2]",
    # a fault during a restart
    "ranks/test_second_faults.py::test_a_rank_dies_during_the_restart[rank_assignment-1-0]",
    "ranks/test_second_faults.py::test_the_rank_that_raised_dies_during_the_restart[abort-0]",
    # where everybody is meanwhile
    "ranks/test_status.py::test_where_a_rank_is[sleep]",
    # hooks, calls, logs
    "ranks/test_hooks.py::test_initialize_raises_an_exception",
    "ranks/test_hooks.py::test_a_rank_leaves_whose_check_fails_again[HealthCheckError-2]",
    "ranks/test_usage.py::test_calls_go_on_with_the_survivors",
    "ranks/test_usage.py::test_current_call_and_store",
    "ranks/test_usage.py::test_restart_and_atomic[short]",
    "ranks/test_logs.py::test_nobody_is_killed_for_a_log_that_blocks[standard error]",
    "ranks/test_leftovers.py::test_what_is_alive[chain]",
    "ranks/test_leftovers.py::test_who_holds_on_is_said_once",
    "ranks/test_leftovers.py::test_what_an_interrupted_context_manager_has_set",
    "ranks/test_groups.py::test_groups_in_cycles_end_with_their_iteration[sharded]",
    "ranks/test_hostile.py::test_a_roster_of_somebody_else",
    "ranks/test_process_one.py::test_it_ends_itself",
    # processes that join, hot spares
    "ranks/test_joining.py::test_one_dies_and_is_replaced[0]",
    "ranks/test_same_port.py::test_the_first_one_runs[2]",
    "ranks/test_joining.py::test_a_spare_takes_the_slot_of_the_next_that_dies",
    "ranks/test_spares.py::test_a_spare_takes_the_freed_slot[1]",
    # monitors and hosts are lost
    "ranks/test_monitors.py::test_a_restart_after_the_death_of_a_monitor",
    "ranks/test_store_host.py::test_the_job_survives_the_host_of_rank_0",
    "net/test_partitions.py::test_plugged_in_again_in_time",
    # live state
    "ranks/test_live.py::test_replicated_one_dies_and_is_replaced[after 3-1]",
    "ranks/test_live.py::test_sharded_one_raises[before 5]",
    "ranks/test_kept_loader.py::test_one_dies_and_the_others_share_what_it_had",
    # the launcher
    "ranks/test_respawn.py::test_one_fault[raises]",
    "launcher/test_decisions.py",
    "launcher/test_ending.py::test_a_signal_is_passed_on[15]",
    "launcher/test_inherited.py::test_children_that_nobody_is_to_wait_for",
    "launcher/test_inherited.py::test_who_leaves_of_it_is_not_started_again",
    "launcher/test_nodes.py::test_a_node_of_a_static_rendezvous_returns",
    "launcher/test_respawn.py::test_one_worker_is_replaced_and_the_others_go_on",
    "launcher/test_respawn.py::test_nothing_grows_with_restarts",
    "launcher/test_warm.py::test_one_that_does_not_answer_is_not_waited_for[9]",
    "launcher/test_warm.py::test_two_fail_at_once[1]",
    # the doctor: a machine that lacks something, and one that does not
    "doctor/test_machine.py::test_a_port_in_use",
    "doctor/test_script.py::test_nothing_to_restart[FAILS]",
    "doctor/test_script.py::test_the_page_lists_the_checks",
    # what users copy
    "testing/test_planted.py",
    "testing/test_runs.py::test_the_same_result_as_without_a_fault",
    "examples/test_fault_schedule.py",
    "examples/test_readme.py",
)
AT_A_TIME = 2


def add_options(parser: pytest.Parser) -> None:
    """The options that choose the tier."""
    group = parser.getgroup("tiers")
    group.addoption("--full", action="store_true", help="every test; without it a run that names no files is quick")
    group.addoption("--left-out", action="store_true", help="only the tests that a quick run leaves out")
    group.addoption("--quick", action="store_true", help="only quick tests, also where files are named")


def choose(config: pytest.Config) -> None:
    """Decide which tier this run is, before pytest-xdist decides about workers. A worker has the same arguments."""
    option = config.option
    if option.full + option.left_out + option.quick > 1:
        raise pytest.UsageError("choose one of --full (every test), --quick and --left-out (what --quick leaves out)")
    everything = _is_everything(config)
    option.quick |= everything and not (option.full or option.left_out)
    alone = hasattr(config, "workerinput") or option.usepdb or option.trace or option.collectonly
    if everything and not alone and getattr(option, "numprocesses", 0) is None:
        # one that is done takes over what waits for the other: tests of one file take as long as all of others
        option.numprocesses, option.dist = AT_A_TIME, "worksteal"


def _is_everything(config: pytest.Config) -> bool:
    """Whether the run names no tests itself."""
    plain = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return plain and not (config.option.keyword or config.option.markexpr)


def within(item: pytest.Item) -> str:
    """Its place below the folder of tests."""
    return item.nodeid.removeprefix("tests/")


def is_quick(item: pytest.Item) -> bool:
    """Whether it runs without ``--full``."""
    place = within(item)
    if place.partition("/")[0] in FOLDERS:
        return not place.startswith(SLOW)
    return place in QUICK or place.partition("::")[0] in QUICK


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of the other tier."""
    option = config.option
    if (option.full or option.left_out) and _is_everything(config) and not (option.deselect or option.ignore):
        _check(items)
    if not (config.option.quick or config.option.left_out):
        return
    others = [item for item in items if is_quick(item) != config.option.quick]
    items[:] = [item for item in items if is_quick(item) == config.option.quick]
    config.hook.pytest_deselected(items=others)


def _check(items: list[pytest.Item]) -> None:
    """Raises pytest.UsageError for a name in the tables that no test has."""
    places = list(map(within, items))
    stale = [name for name in (*SLOW, *QUICK) if not any(place.startswith(name) for place in places)]
    if stale:
        raise pytest.UsageError(f"tests/tiers.py names tests that are not there: {', '.join(stale)}")


def report(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what a quick run has left out."""
    if config.option.quick:
        terminal.write_sep("-", "slower tests were left out; all of them: python -m pytest --full")
