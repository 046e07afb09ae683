"""Options: durations in both forms, and an error for each mistake that names the option, its value and the remedy."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import signal
from pathlib import Path

import pytest

from inprocess.exception import OptionError
from inprocess.options import HOOKS, Options, seconds
from inprocess.protocol.timing import SILENCE_SHARE
from inprocess.wrap import Wrapper


def test_defaults() -> None:
    options = Options.build()
    assert options == Options()
    assert (options.soft_timeout, options.hard_timeout, options.barrier_timeout) == (60.0, 90.0, 120.0)
    assert (options.last_call_wait, options.termination_grace_time, options.heartbeat_timeout) == (0.0, 5.0, 30.0)
    assert options.enabled and options.store_factory is None and options.store_kwargs == {}


def test_each_option_is_explained() -> None:
    """In the docstring and in the guide; with the hooks it is all that `Wrapper` takes."""
    taken = {name for name, each in inspect.signature(Wrapper).parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert taken == {field.name for field in dataclasses.fields(Options)} | {*HOOKS}
    guide = (Path(__file__).parents[2] / "docs/guide.md").read_text()
    assert not {name for name in taken if f"\n        {name}: " not in str(Wrapper.__doc__)}
    assert not {name for name in taken if f"`{name}" not in guide}


def test_durations_as_timedelta_or_seconds() -> None:
    options = Options.build(soft_timeout=datetime.timedelta(minutes=1), hard_timeout=70, last_call_wait=0.5)
    assert (options.soft_timeout, options.hard_timeout, options.last_call_wait) == (60.0, 70.0, 0.5)
    assert isinstance(options.hard_timeout, float)


@pytest.mark.parametrize(
    "value", ["1", None, True, [1], float("nan"), float("inf"), -1, 10**400, datetime.timedelta(-1)]
)
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(OptionError, match="soft_timeout="):
        Options.build(soft_timeout=value)


def test_zero_is_a_duration_only_for_last_call_wait() -> None:
    assert seconds("x", 0) == 0
    Options.build(last_call_wait=0)
    with pytest.raises(OptionError, match="heartbeat_interval=0 is out of range: pass a duration greater than 0"):
        Options.build(heartbeat_interval=0)
    with pytest.raises(OptionError, match="monitor_process_interval=1e-12 is too short"):
        Options.build(monitor_process_interval=1e-12)


@pytest.mark.parametrize(
    ("small", "large", "others"),
    [
        ("soft_timeout", "hard_timeout", {}),
        ("hard_timeout", "barrier_timeout", {}),
        ("monitor_process_interval", "heartbeat_timeout", {}),
        ("monitor_process_interval", "soft_timeout", {"heartbeat_timeout": 100}),
        ("heartbeat_interval", "heartbeat_timeout", {}),
        ("heartbeat_timeout", "barrier_timeout", {}),
        ("monitor_thread_interval", "soft_timeout", {}),
        ("progress_watchdog_interval", "soft_timeout", {}),
    ],
)
def test_orderings_name_both_options_and_values(small: str, large: str, others: dict[str, float]) -> None:
    limit = getattr(Options(), large)
    with pytest.raises(OptionError) as caught:
        Options.build(**{small: limit, **others})
    assert f"{small}={limit:g}s must be less than {large}={limit:g}s" in str(caught.value)
    assert f"lower {small} or raise {large}" in str(caught.value)


def test_the_monitors_interval_stays_below_the_barriers_timeout() -> None:
    with pytest.raises(OptionError, match="monitor_process_interval=500s"):
        Options.build(monitor_process_interval=500, heartbeat_timeout=1000)


@pytest.mark.parametrize("heartbeat_timeout", [0.4, 4.0, 30.0])
def test_healthy_ranks_are_heard_whatever_the_intervals_say(heartbeat_timeout: float) -> None:
    """A host counts as lost at 0.75 of heartbeat_timeout: one heartbeat may be late, and one lost."""
    nearly = 0.99 * heartbeat_timeout
    options = Options.build(
        heartbeat_timeout=heartbeat_timeout, heartbeat_interval=nearly, monitor_process_interval=nearly
    )
    assert 2 * options.beats_every < SILENCE_SHARE * heartbeat_timeout
    assert 2 * options.looks_every < heartbeat_timeout / 3  # then a monitor that stands still is replaced
    assert (Options().beats_every, Options().looks_every) == (1, 1)


def test_unknown_options() -> None:
    with pytest.raises(OptionError, match=r"sof_timeout=3: did you mean 'soft_timeout'\?"):
        Options.build(sof_timeout=3)
    with pytest.raises(OptionError, match=r"initalize=<built-in function print>: did you mean 'initialize'\?"):
        Options.build(initalize=print)
    with pytest.raises(
        OptionError, match=r"known options: abort, barrier_timeout, .*, rank_filter, run_dir, soft_timeout"
    ):
        Options.build(zzz=3)


def test_every_option_of_the_wrapper_is_known() -> None:
    options = {field.name for field in dataclasses.fields(Options)}
    assert {*inspect.signature(Wrapper.__init__).parameters} - {"self", "unknown"} == {*options, *HOOKS}


def test_an_order_with_a_default() -> None:
    with pytest.raises(
        OptionError, match=r"soft_timeout=300s must be less than hard_timeout=90s \(hard_timeout: the def"
    ):
        Options.build(soft_timeout=300)
    with pytest.raises(OptionError, match=r"soft_timeout=5s must be less than hard_timeout=4s, because"):
        Options.build(soft_timeout=5, hard_timeout=4)


def test_paths() -> None:
    options = Options.build(monitor_process_logfile="/var/log/m-{rank:03d}.log", monitor_process_pidfile=Path("/run/m"))
    assert options.logfile_for(7) == "/var/log/m-007.log"
    assert options.pidfile_for(7) == "/run/m"
    assert Options().logfile_for(0) is Options().pidfile_for(0) is None
    assert Options.build(monitor_process_logfile=None).monitor_process_logfile is None


@pytest.mark.parametrize(
    "path", ["m.log", "", 3, b"/m", "/m-{host}", "/m-{}", "/m-{rank", "/m-{rank.x}", "/m-{rank[0]}", "/m-{0}", "/m\0"]
)
def test_wrong_paths(path: object) -> None:
    with pytest.raises(OptionError, match="monitor_process_logfile="):
        Options.build(monitor_process_logfile=path)


def test_store_options() -> None:
    given = {"timeout": 3}
    options = Options.build(store_factory=dict, store_kwargs=given)
    assert options.store_factory is dict and options.store_kwargs == given and options.store_kwargs is not given
    for wrong in ({"store_factory": 3}, {"store_kwargs": [1]}, {"store_kwargs": {1: 2}}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Options.build(**wrong)


def test_signals() -> None:
    assert Options.build(interrupt_signal=signal.SIGUSR1).interrupt_signal == signal.SIGUSR1
    assert Options.build(interrupt_signal=None).interrupt_signal is None
    for wrong in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, 0, 1000, "SIGUSR1", True):
        with pytest.raises(OptionError, match="interrupt_signal="):
            Options.build(interrupt_signal=wrong)
    with pytest.raises(OptionError, match="leave_signals=SIGFPE cannot be handled"):
        Options.build(leave_signals=(signal.SIGTERM, signal.SIGFPE))
    with pytest.raises(OptionError, match="one signal cannot mean both"):
        Options.build(leave_signals=(signal.SIGTERM, signal.SIGUSR1), interrupt_signal=signal.SIGUSR1)


def test_enabled_is_a_flag() -> None:
    assert not Options.build(enabled=False).enabled
    with pytest.raises(OptionError, match="enabled=0"):
        Options.build(enabled=0)


@pytest.mark.parametrize("value", [True, False, 0, -1, 2.0, "10", 1_000_001])
def test_max_repeats_is_a_count_or_none(value: object) -> None:
    with pytest.raises(OptionError, match=f"max_repeats={value!r} must be an integer from 1"):
        Options.build(max_repeats=value)


def test_max_repeats() -> None:
    assert [Options.build(max_repeats=value).max_repeats for value in (None, 1, 3)] == [None, 1, 3]
    assert Options.build().max_repeats == 10
