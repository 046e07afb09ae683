"""docs/migration.md and the code agree: each name of the established API has a row, and is what the row says."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import inprocess
from inprocess.exception import TimeoutError
from inprocess.launcher import arguments, ft_config, ft_launcher
from inprocess.nested_restarter import NestedRestarterFinalized
from inprocess.rank_filter import ActiveWorldSizeDivisibleBy, WorldSizeDivisibleBy
from inprocess.store import BarrierError, BarrierTimeout
from inprocess.tools.inject_fault import Fault
from tests.harness.wheel import wheel

from . import established

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text()


def table(heading: str) -> list[list[str]]:
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?:^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


#: name, which may be a pattern -> what stands in the column "here"
ROWS = {name: row[1] for row in table("Names") for name in quoted(row[0])}


def verdict(name: str) -> str:
    """What the table says of it: the row of its own, else of what it matches, else of what it is a part of."""
    if name in ROWS:
        return ROWS[name]
    parent = name.rpartition(".")[0]
    # the most specific pattern; one for all of a module is not for the members of its classes
    patterns = [
        row for row in ROWS if "*" in row and fnmatch.fnmatchcase(name, row) and row.count(".") >= name.count(".")
    ]
    if patterns:
        return ROWS[max(patterns, key=len)]
    return verdict(parent) if parent else "no row"


def resolve(name: str) -> Any:
    """Whatever has this name below the package; AttributeError or ModuleNotFoundError where nothing has."""
    found: Any = inprocess
    for part in name.split("."):
        if part in getattr(found, "__dataclass_fields__", ()):
            return found.__dataclass_fields__[part]
        if inspect.ismodule(found) and hasattr(found, "__path__") and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found, part)
    return found


def exists(name: str) -> bool:
    try:
        resolve(name)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


@pytest.mark.parametrize("name", established.ALL)
def test_a_name_is_what_its_row_says(name: str) -> None:
    said = verdict(name)
    if said == "same":
        resolve(name)
    elif said == "absent":
        assert not exists(name)
    elif said != "private":
        (other,) = quoted(said)
        resolve(other)
        assert not exists(name)


def test_every_row_is_about_a_name_that_was_there() -> None:
    unknown = [row for row in ROWS if not fnmatch.filter(established.ALL, row)]
    assert not unknown


def test_no_name_has_two_rows() -> None:
    names = [name for row in table("Names") for name in quoted(row[0])]
    assert len(names) == len(set(names)) > 80


def test_what_is_missing_has_a_reason() -> None:
    assert not [row for row in table("Names") if row[1] != "same" and len(row[2]) < 10]


def test_every_option_is_taken_and_has_a_row() -> None:
    told = [name for row in table("Options of `Wrapper`") for name in quoted(row[0])]
    options = established.OPTIONS.split()
    assert sorted(told) == sorted(options)
    parameters = inspect.signature(inprocess.Wrapper.__init__).parameters
    assert set(options) <= set(parameters)
    inprocess.Wrapper(**{name: parameters[name].default for name in options})


def test_every_option_of_its_launcher_has_a_row_which_says_what_is_said_when_it_is_given() -> None:
    rows = {name: row[1] for row in table("Options of its launcher") for name in quoted(row[0])}
    assert sorted(rows) == established.LAUNCHER.split()
    for option, here in rows.items():
        replacement = ft_config.REPLACED.get(option.removeprefix("--"), "same")
        assert here.replace("`", "") == replacement.replace("`", ""), option


def test_every_option_of_its_launcher_is_taken() -> None:
    assert {*established.LAUNCHER.split()} <= {*arguments.options()._option_string_actions}


def test_every_setting_of_its_files_is_taken() -> None:
    assert {*ft_config.Settings.__dataclass_fields__} < {*established.SETTINGS.split()}
    assert {*established.SETTINGS.split()} <= {*ft_config.Settings.__dataclass_fields__, *ft_launcher.SETTINGS}


# --- the package itself, where it is there


def test_the_names_are_those_of_the_wheel() -> None:
    names, later = wheel().names("inprocess"), {*established.names(established.LATER)}
    moved = {f"tools.{name}" for name in wheel().names("shared_utils") if name.startswith("inject_fault.")}
    assert moved
    assert names | moved <= set(established.ALL)
    assert later <= names


def test_the_options_are_those_of_the_wheel() -> None:
    options = wheel().arguments("inprocess.wrap", "Wrapper")
    assert options == {*established.OPTIONS.split()} - established.NOT_IN_0_7


def test_the_launchers_options_and_settings_are_those_of_the_wheel() -> None:
    package, known = wheel(), arguments.options()._option_string_actions
    options = package.options("fault_tolerance.launcher", "fault_tolerance.cli_args")
    assert options <= set(known)
    own = {option.replace("_", "-") for option in options} & {*established.LAUNCHER.split()}
    assert own == {*established.LAUNCHER.split()} - {"--ft-cfg-path"}  # whose spellings are a variable there
    settings = package.fields("fault_tolerance.config", "FaultToleranceConfig")
    assert settings == {*established.SETTINGS.split()}


def test_every_hook_has_a_row() -> None:
    told = {name for row in table("Hooks") for name in quoted(row[0])}
    hooks = "initialize abort finalize health_check completion terminate rank_assignment rank_filter"
    assert told == set(hooks.split())


def test_defaults_that_the_page_calls_the_same() -> None:
    """Those of the established API, in seconds."""
    expected = {
        "soft_timeout": 60, "hard_timeout": 90, "heartbeat_interval": 1, "heartbeat_timeout": 30,
        "barrier_timeout": 120, "completion_timeout": 120, "monitor_thread_interval": 1,
        "monitor_process_interval": 1, "progress_watchdog_interval": 1, "termination_grace_time": 5,
        "last_call_wait": 0,
    }  # fmt: skip
    parameters = inspect.signature(inprocess.Wrapper.__init__).parameters
    assert {name: parameters[name].default.total_seconds() for name in expected} == expected


# --- the names that were added for it


def test_both_generations_names_of_a_fault() -> None:
    pairs = {
        "GPU": "GPU_ERROR", "GPU_SLEEP": "GPU_SLEEP", "ASYNC_EXC": "ASYNC_EXC", "SIGNAL_EXC": "SIGNAL_EXC",
        "ABORT": "OS_ABORT", "GIL": "LOCK_GIL", "SEGFAULT": "SEGFAULT", "INT": "SIGINT", "KILL": "SIGKILL",
        "TERM": "SIGTERM", "STOP": "SIGSTOP",
    }  # fmt: skip
    for older, newer in pairs.items():
        assert Fault[older] is Fault[newer]
        assert Fault[older].name == newer


def test_a_barrier_that_times_out_can_be_caught_by_its_older_name() -> None:
    for kind in (BarrierError, BarrierTimeout):
        with pytest.raises(kind, match="barrier_timeout"):
            raise TimeoutError("nobody arrived within barrier_timeout=1s")


def test_filters_of_the_newer_generation() -> None:
    assert issubclass(WorldSizeDivisibleBy, ActiveWorldSizeDivisibleBy)
    state = inprocess.State(rank=3, world_size=5)
    state.activate_all_ranks()
    assert ActiveWorldSizeDivisibleBy(2)(state).active_world_size == 4


@pytest.mark.parametrize(("special_rank", "told"), [(None, [0, 1]), (0, [0]), (1, [1]), (2, [])])
def test_only_the_special_rank_tells(
    special_rank: int | None, told: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inprocess")
    hook = NestedRestarterFinalized(special_rank=special_rank)
    said = []
    for rank in range(2):
        caplog.clear()
        state = inprocess.State(rank, 2).freeze()
        assert hook(state) is state
        said += [rank] * len(caplog.messages)
    assert said == told
