"""Settings of the launcher that watches workers: a YAML file, options, and what is wrong with them."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from inprocess.exception import OptionError
from inprocess.launcher import ft_config
from inprocess.launcher.ft_config import Settings


def load(*options: str) -> Settings:
    parser = argparse.ArgumentParser()
    ft_config.add_arguments(parser)
    return ft_config.load(parser.parse_args(options))


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return f"--ft-cfg-path={path}"

    return write


def test_defaults() -> None:
    settings = load()
    assert settings == Settings()
    assert settings.initial_rank_heartbeat_timeout == 60 * 60
    assert settings.rank_heartbeat_timeout == 45 * 60
    assert settings.rank_section_timeouts == {} and settings.rank_out_of_section_timeout is None
    assert (settings.workload_check_interval, settings.safety_factor) == (5.0, 5.0)
    assert settings.rank_termination_signal is signal.SIGKILL


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("--ft-rank-heartbeat-timeout=12.5", "rank_heartbeat_timeout", 12.5),
        ("--ft_rank_heartbeat_timeout=12.5", "rank_heartbeat_timeout", 12.5),
        ("--ft-initial-rank-heartbeat-timeout=null", "initial_rank_heartbeat_timeout", None),
        ("--ft-rank-heartbeat-timeout=None", "rank_heartbeat_timeout", None),
        ("--ft-rank-out-of-section-timeout=7", "rank_out_of_section_timeout", 7.0),
        ("--ft-rank-section-timeouts=load:600, step:null", "rank_section_timeouts", {"load": 600.0, "step": None}),
        ("--ft-rank-section-timeouts=io:read:5", "rank_section_timeouts", {"io:read": 5.0}),
        ("--ft-rank-section-timeouts=", "rank_section_timeouts", {}),
        ("--ft-workload-check-interval=0.5", "workload_check_interval", 0.5),
        ("--ft-safety-factor=3", "safety_factor", 3.0),
        ("--ft-rank-termination-signal=term", "rank_termination_signal", signal.SIGTERM),
        ("--ft-rank-termination-signal=SIGUSR1", "rank_termination_signal", signal.SIGUSR1),
        ("--ft-rank-termination-signal=2", "rank_termination_signal", signal.SIGINT),
    ],
)
def test_options(option: str, name: str, value: object) -> None:
    assert load(option) == dataclasses.replace(Settings(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "fault_tolerance: {safety_factor: 3, rank_heartbeat_timeout: null}",
        "trainer:\n  callbacks:\n    - other: 1\n    - fault_tolerance:\n        safety_factor: 3\n"
        "        rank_heartbeat_timeout:\n",
    ],
    ids=["at the top", "deep in a list"],
)
def test_the_section_is_found_at_any_depth(file: Any, text: str) -> None:
    assert load(file(text)) == Settings(safety_factor=3.0, rank_heartbeat_timeout=None)


def test_all_settings_in_a_file(file: Any) -> None:
    text = """
    fault_tolerance:
      initial_rank_heartbeat_timeout: 100
      rank_heartbeat_timeout: 50.5
      rank_section_timeouts: {load: 60, step: null}
      rank_out_of_section_timeout: 1e2
      workload_check_interval: 1
      safety_factor: 2
      rank_termination_signal: SIGTERM
    """
    assert load(file(text)) == Settings(
        initial_rank_heartbeat_timeout=100.0,
        rank_heartbeat_timeout=50.5,
        rank_section_timeouts={"load": 60.0, "step": None},
        rank_out_of_section_timeout=100.0,
        workload_check_interval=1.0,
        safety_factor=2.0,
        rank_termination_signal=signal.SIGTERM,
    )


def test_a_file_of_ft_launcher_is_read(file: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each setting that means nothing here is named with what stands for it; not those that are switched off."""
    text = "fault_tolerance: {rank_heartbeat_timeout: 50, segment: 4, enable_nic_monitor: false, cycle_info_dir: null}"
    path = file(text)
    assert load(path) == Settings(rank_heartbeat_timeout=50.0)
    assert caplog.messages == [
        f"{path}: segment does nothing here; in its place: "
        "rank_assignment=Tree([...]) of the Wrapper, with a Layer for the domains"
    ]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--term-timeout=1800", "--term-timeout does nothing here; in its place: --shutdown-timeout"),
        ("--workers_stop_timeout=15", "--workers-stop-timeout does nothing here; in its place: --shutdown-timeout"),
        ("--ft-cycle_info_dir=x", "--ft-cycle-info-dir does nothing here; in its place: --run-dir"),
        ("--ft_cycle_info_dir=x", "--ft-cycle-info-dir does nothing here; in its place: --run-dir"),
        ("--ft-ignore-missing-cfg", "--ft-ignore-missing-cfg does nothing here; in its place: nothing: every setting"),
        ("--ft-rank_heartbeat_timeout=2700", ""),
        ("--ft-rank-out-of-section-timeout=", ""),
    ],
)
def test_options_of_ft_launcher(option: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load(option) == Settings()
    assert [message.startswith(told) for message in caplog.messages] == [True] * bool(told)


def test_an_option_wins_over_the_file(file: Any) -> None:
    path = file("fault_tolerance: {safety_factor: 3, workload_check_interval: 1}")
    assert load(path, "--ft-safety-factor=4") == Settings(safety_factor=4.0, workload_check_interval=1.0)
    assert load(file("fault_tolerance:")) == Settings()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ft-rank-heartbeat-timeout=soon", r"--ft-rank-heartbeat-timeout='soon' is not a duration: give seconds"),
        ("--ft-rank-heartbeat-timeout=0", "give seconds above 0"),
        ("--ft-rank-heartbeat-timeout=-1", "give seconds above 0"),
        ("--ft-rank-heartbeat-timeout=nan", "give seconds above 0"),
        ("--ft-rank-heartbeat-timeout=1e12", "at most 1e"),
        ("--ft-workload-check-interval=null", "--ft-workload-check-interval='null' is not a duration"),
        ("--ft-safety-factor=0.5", "--ft-safety-factor='0.5' must be a number, at least 1"),
        ("--ft-rank-section-timeouts=step", "is not NAME:SECONDS"),
        ("--ft-rank-section-timeouts=:5", "is not NAME:SECONDS"),
        ("--ft-rank-section-timeouts=a:5,a:6", "names a section twice"),
        ("--ft-rank-section-timeouts=a:x", "--ft-rank-section-timeouts: a='x' is not a duration"),
        ("--ft-rank-termination-signal=SIGNONE", "'SIGNONE' is no signal: give one such as"),
        ("--ft-rank-termination-signal=999", "'999' is no signal"),
        ("--ft-cfg-path=/nonexistent.yaml", "--ft-cfg-path=/nonexistent.yaml cannot be read"),
    ],
)
def test_wrong_options(option: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(option)


def test_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever parses says what it finds wrong; the hint comes with it."""
    for option in ("--ft-rank-hartbeat-timeout=5", "--ft_rank_hartbeat_timeout=5"):
        with pytest.raises(SystemExit):
            load(option)
        assert f"unrecognized arguments: {option}: did you mean --ft-rank-heartbeat-timeout?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load("--ft-colour=5", "--other")
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fault_tolerance: {rank_hartbeat_timeout: 5}",
            "unknown setting 'rank_hartbeat_timeout'.*'rank_heartbeat_timeout'",
        ),
        ("fault_tolerance: {colour: 5}", "unknown setting 'colour'.*known settings: initial_rank"),
        ("fault_tolerance: {1: 5}", "unknown setting 1"),
        ("fault_tolerance: {safety_factor: [5]}", r"safety_factor=\[5\] must be a number"),
        ("fault_tolerance: {rank_heartbeat_timeout: yes}", "rank_heartbeat_timeout=True is not a duration"),
        ("fault_tolerance: {rank_section_timeouts: [5]}", "must hold seconds by the names"),
        ("fault_tolerance: {rank_section_timeouts: {5: 5}}", "5 is no name of a section"),
        ("fault_tolerance: {rank_termination_signal: null}", "None is no signal"),
        ("fault_tolerance: {rank_termination_signal: true}", "True is no signal"),
        ("fault_tolerance: 5", "must hold settings by name"),
        ("other: 5", "has no section 'fault_tolerance'"),
        ("", "has no section"),
        ("a: {fault_tolerance: }\nb: {fault_tolerance: }", "has 2 sections"),
        ("a: [1", "is no YAML"),
        ("a: &a [*a]", "has no section"),
        ("a: !!python/object:os.system {}", "is no YAML"),
    ],
)
def test_wrong_files(file: Any, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=rf"(?s)--ft-cfg-path=.*{message}"):
        load(file(text))


def test_a_file_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="cannot be read"):
        load(f"--ft-cfg-path={path}")


def test_yaml_is_needed_for_a_file_only(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    assert load("--ft-safety-factor=2").safety_factor == 2
    with pytest.raises(OptionError, match=r"needs pyyaml.*pip install 'inprocess\[launcher\]'"):
        load(file("fault_tolerance:"))


def test_what_a_worker_is_told() -> None:
    limits = load(
        "--ft-rank-section-timeouts=step:5", "--ft-rank-heartbeat-timeout=null", "--ft-safety-factor=2"
    ).limits()
    assert (limits.first, limits.heartbeat, limits.out_of_section) == (3600.0, None, None)
    assert (dict(limits.sections), limits.safety_factor) == ({"step": 5.0}, 2.0)
