"""The doctor's checks on machines that are made up, what it prints, and that its page and its figures are true."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from inprocess.doctor import checks, figures, limits, names, program, report, timeouts, trial, variables, versions
from inprocess.doctor.checks import CHECKS, Examined
from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings
from inprocess.doctor.script_checks import SCRIPT_CHECKS
from inprocess.doctor.trial import TRIALS, Measured
from inprocess.options import Options
from inprocess.system import progress
from tests.unit import test_claims

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/doctor.md").read_text()
TABLES = (ROOT / "docs/performance/tables.md").read_text()
NONE = Settings(4, {})


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


# --- variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_variables_of_torch(name: str, value: str) -> None:
    finding = one(variables.torch(Settings(4, {name: value})))
    assert (finding.check, finding.level, finding.what) == ("variables.torch", "warning", f"{name}={value} is set")
    assert "the process" in finding.why or "torch ends" in finding.why
    assert finding.remedy.startswith("unset it")


def test_no_variables_of_torch() -> None:
    assert list(variables.torch(NONE)) == []
    assert list(variables.torch(Settings(4, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}))) == []


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"NCCL_SOCKET_RETRY_CNT": "34", "NCCL_SOCKET_RETRY_SLEEP_MSEC": "100"}, "for 59.5 s"),
        ({"NCCL_RAS_ENABLE": "1"}, "NCCL_RAS_ENABLE=1"),
        ({"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, "TORCH_NCCL_USE_COMM_NONBLOCKING=1"),
    ],
)
def test_variables_of_nccl(environ: dict[str, str], what: str) -> None:
    assert what in one(variables.nccl(Settings(4, environ))).what
    assert list(variables.nccl(NONE)) == []


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"RANK": "0"}, "only RANK=0 is set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK=x: not a number"),
    ],
)
def test_ranks_that_do_not_fit(environ: dict[str, str], what: str) -> None:
    finding = one(variables.ranks(Settings(4, environ)))
    assert finding.level == "problem" and what in finding.what
    assert list(variables.ranks(Settings(4, {"RANK": "3", "WORLD_SIZE": "4"}))) == []


def test_ranks_that_do_not_follow_from_slurm() -> None:
    step = {"INPROCESS_LAUNCH": "slurm", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "x"}
    finding = one(variables.ranks(Settings(4, step)))
    assert finding.level == "problem" and "SLURM_PROCID='x' is no number" in finding.what
    assert finding.remedy.startswith("Start the program with srun")
    assert list(variables.names(Settings(4, step))) == []


def test_a_variable_that_is_misspelt() -> None:
    finding = one(variables.names(Settings(4, {"INPROCESS_RUNDIR": "x", "INPROCESS_RUN_DIR": "y"})))
    assert finding.what.startswith("INPROCESS_RUNDIR ") and finding.remedy == "write INPROCESS_RUN_DIR"


# --- timeouts -------------------------------------------------------------------------------------------------------


def test_timeouts_that_contradict_each_other() -> None:
    (check,) = (check for check in CHECKS if check.id == "timeouts.order")
    finding = one(check.run(Settings(4, {}, options={"soft_timeout": 600.0})))
    assert finding.level == "problem" and "soft_timeout=600s must be less than hard_timeout=90s" in finding.what
    finding = one(check.run(Settings(4, {}, options={"heartbeat_timeout": 10000.0})))
    assert finding.what.endswith("must be less than barrier_timeout=120s (barrier_timeout: the default)")
    right = {"soft_timeout": 600.0, "hard_timeout": 660.0, "barrier_timeout": 900.0}
    assert list(check.run(Settings(4, {}, options=right))) == []


@pytest.mark.parametrize(("step", "level"), [(60, "problem"), (59, "warning"), (21, "warning")])
def test_steps_that_are_long(step: float, level: str) -> None:
    assert one(timeouts.against_step({}, step)).level == level


@pytest.mark.parametrize("step", [20, 0.1])
def test_steps_that_are_short(step: float) -> None:
    assert list(timeouts.against_step({}, step)) == []


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Callable[..., str]:
    """Make up files below a root folder."""

    def make(**files: str) -> str:
        for path, text in files.items():
            place = tmp_path / path.replace("__", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return str(tmp_path)

    return make


def test_memory_of_a_group_above(root: Callable[..., str]) -> None:
    """Version 2: the limit of a parent holds, too; what the kernel can drop is free."""
    files = {
        "proc__self__cgroup": "0::/slice/job\n",
        "sys__fs__cgroup__slice__job__memory.max": "max\n",
        "sys__fs__cgroup__slice__memory.max": str(1000 << 20),
        "sys__fs__cgroup__slice__memory.current": str(800 << 20),
        "sys__fs__cgroup__slice__memory.stat": f"anon 1\ninactive_file {100 << 20}\n",
    }
    finding = one(limits.memory(Settings(1, {}, root=root(**files))))
    assert finding.level == "problem" and "the control group (container) has 300 MiB left" in finding.what


def test_memory_of_version_1(root: Callable[..., str]) -> None:
    files = {
        "proc__self__cgroup": "9:memory:/job\n",
        "sys__fs__cgroup__memory__job__memory.limit_in_bytes": str(500 << 20),
        "sys__fs__cgroup__memory__job__memory.usage_in_bytes": str(450 << 20),
    }
    assert "has 50 MiB left" in one(limits.memory(Settings(1, {}, root=root(**files)))).what


def test_processes_of_a_group(root: Callable[..., str]) -> None:
    files = {
        "proc__self__cgroup": "0::/job\n",
        "sys__fs__cgroup__job__pids.max": "100\n",
        "sys__fs__cgroup__job__pids.current": "60\n",
    }
    finding = one(limits.processes(Settings(4, {}, root=root(**files))))
    assert finding.level == "problem" and "pids.max 100 of the control group leaves 40" in finding.what
    assert list(limits.processes(Settings(1, {}, root=root(**files)))) == []


@pytest.mark.parametrize(
    ("command", "pid", "warns"),
    [
        ("/usr/bin/python3.11 train.py --steps 7", 70, True),
        ("python -m inprocess.run train.py", 70, False),
        ("/usr/bin/python3 /usr/local/bin/inprocess run train.py", 70, False),
        ("/usr/bin/python3 /usr/local/bin/torchrun train.py", 70, False),
        ("/usr/bin/python3 /usr/local/bin/inprocess doctor", 1, True),
        ("dumb-init -- python train.py", 70, False),
        ("/sbin/init", 70, False),
    ],
)
def test_process_one(root: Callable[..., str], command: str, pid: int, warns: bool) -> None:
    settings = Settings(1, {}, root=root(**{"proc/1/cmdline": command.replace(" ", "\0") + "\0"}))
    found = list(limits.process_one(settings, pid))
    assert [finding.level for finding in found] == ["warning"] * warns
    if warns:
        assert command in found[0].what


def test_clocks() -> None:
    assert list(limits.clocks(NONE)) == []
    assert "moved by 0 s" in one(limits.clocks(NONE, monotonic=lambda: 7.0)).what
    finding = one(limits.clocks(NONE, wall=lambda: 3600.0))
    assert finding.level == "warning" and finding.what == "the date is 1970-01-01"


# --- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "levels"), [((3, 9), ["problem"]), ((3, 10), []), ((3, 15), ["note"])])
def test_pythons(found: tuple[int, int], levels: list[str]) -> None:
    assert [finding.level for finding in versions.python(NONE, found)] == levels


@pytest.mark.parametrize(("text", "levels"), [("2.8.1", ["problem"]), ("2.13.0+cpu", []), ("3.0.0", ["note"])])
def test_torches(text: str, levels: list[str]) -> None:
    assert [finding.level for finding in versions.torch(NONE, lambda _: text)] == levels


def test_no_torch() -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert one(versions.torch(NONE, missing)).remedy.startswith(sys.executable)


def test_the_range_is_the_one_that_was_run() -> None:
    pythons = {test_claims.minor(row[1]) for row in test_claims.rows()}
    torches = {test_claims.minor(row[2]) for row in test_claims.rows() if row[2] != "none"}
    assert (min(pythons), max(pythons)) == versions.PYTHONS
    assert (min(torches), max(torches)) == versions.TORCHES


@pytest.mark.parametrize(("have", "lacks"), [((False, False), "torch.distributed"), ((True, False), "Gloo")])
def test_a_build_without(have: tuple[bool, bool], lacks: str) -> None:
    assert one(versions.missing_backend(*have)).what.endswith(lacks)


def test_an_old_nccl() -> None:
    assert one(versions.nccl_version((2, 21, 5))).what.startswith("NCCL 2.21.5")
    assert list(versions.nccl_version((2, 29, 7))) == []


# --- all of them ----------------------------------------------------------------------------------------------------


def test_a_check_that_fails_itself() -> None:
    def broken(_: Settings) -> Iterable[Finding]:
        raise RuntimeError("boom")

    def absent(_: Settings) -> Iterable[Finding]:
        raise NothingToLookAt("no such thing")

    runs = {"a": broken, "b": absent, "c": lambda _: []}
    found = checks.examine(NONE, lambda _: None, [Check(name, "", "", run) for name, run in runs.items()])
    assert found.skipped == {"a": "the check failed: RuntimeError: boom", "b": "no such thing"}
    assert found.ran == ["c"]


def test_a_finding_is_one_line_each() -> None:
    for check in CHECKS:
        assert re.fullmatch(r"[a-z]+\.[a-z]+", check.id)
        assert "\n" not in check.about + check.remedy


def test_not_on_the_first_host() -> None:
    with pytest.raises(NothingToLookAt, match="another host"):
        list(names.port(Settings(4, {"MASTER_PORT": "29500", "NODE_RANK": "1"})))


# --- what is printed ------------------------------------------------------------------------------------------------

CLEAN = [Measured(each, 0.0123, ()) for each in TRIALS]


def test_one_screen_where_nothing_is_wrong() -> None:
    found = Examined(ran=[check.id for check in CHECKS[:12]], skipped={check.id: "-" for check in CHECKS[12:]})
    lines = list(report.to_text("head", found, CLEAN))
    assert len(lines) <= 24 and max(map(len, lines)) <= report.WIDTH
    assert lines[-1] == "nothing is wrong here"
    assert report.status(found) == 0


def test_findings_are_grouped_by_level() -> None:
    found = Examined(ran=["a.b", "a.c"])
    found.findings = [
        Finding("a.b", "note", "n", "why", "remedy"),
        Finding("a.c", "problem", "what", "why", "remedy", "train.py:7"),
    ]
    text = "\n".join(report.to_text("head", found, CLEAN))
    assert text.index("PROBLEM  a.c: train.py:7: what") < text.index("NOTE  a.b: n")
    assert text.endswith("1 problem, 1 note")
    assert "  remedy  remedy" in text
    assert report.status(found) == 1


def test_restarts_beside_the_figures() -> None:
    lines = list(report.to_text("head", Examined(), [*CLEAN[:1], Measured(TRIALS[1], None, ())]))
    (raised,) = (line for line in lines if "raises an exception" in line)
    (killed,) = (line for line in lines if "SIGKILL" in line)
    (hang,) = (line for line in lines if "hangs" in line)
    assert raised.split()[-4:] == ["12", "ms", "14", "ms"]
    assert killed.split()[-3:] == ["failed", "27", "ms"]
    assert hang.endswith("not tried")


def test_a_slow_restart() -> None:
    assert list(trial._slow(TRIALS[0], 0.4)) == []
    finding = one(trial._slow(TRIALS[0], 1.5))
    assert finding.level == "warning" and "took 1.50 s, against 14 ms" in finding.what


def test_json() -> None:
    found = Examined(["a.b"], {"a.c": "no"}, [Finding("a.b", "note", "n", "w", "r")])
    told: dict[str, Any] = json.loads(json.dumps(report.to_json(found, CLEAN)))
    assert list(told) == ["version", "checks", "skipped", "findings", "restarts"]
    assert told["restarts"] == dict.fromkeys(("exception", "kill", "hang", "stop"), 0.0123)
    assert told["findings"][0] == {
        "check": "a.b",
        "level": "note",
        "what": "n",
        "why": "w",
        "remedy": "r",
        "where": "",
    }
    assert all(f"`{name}`" in PAGE for name in (*told, *told["findings"][0]))


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--npoc", "2"], "unknown option '--npoc': did you mean '--nproc'?"),
        (["--nproc", "0"], "'0' is not a number of ranks from 1 to 1024"),
        (["--nproc", "two"], "'two' is not a number of ranks"),
        (["train.py"], "to try a script of yours, inprocess doctor -- train.py"),
        (["--"], "-- has no script behind it"),
        (["--", "/no/such.py"], "there is no script '/no/such.py'"),
        (["--option", "soft_timeut=3"], "did you mean 'soft_timeout'?"),
        (["--option", "soft_timeout"], "'soft_timeout' has no value: --option soft_timeout=60"),
        (["--option", "soft_timeout=-1"], "'-1' is not a number of seconds above 0"),
        (["--step", "soon"], "'soon' is not a number of seconds above 0"),
    ],
)
def test_wrong_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert text in told.err and len(told.err.splitlines()) == 2


def test_every_duration_is_an_option() -> None:
    assert {"soft_timeout", "heartbeat_interval", "last_call_wait"} <= set(program.DURATIONS)
    assert all(hasattr(Options, name) for name in program.DURATIONS)


# --- the page and the figures ---------------------------------------------------------------------------------------


def test_the_page_lists_the_checks() -> None:
    rows = re.findall(r"^\| `([a-z]+\.[a-z]+)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    of_machine = [row for row in rows if not row[0].startswith(("restart.", "script."))]
    assert of_machine == [(check.id, check.about, check.remedy) for check in CHECKS]
    assert [row[0] for row in rows if row[0].startswith("restart.")] == [f"restart.{each.name}" for each in TRIALS]


@pytest.mark.parametrize("figure", [figures.EXCEPTION, figures.KILL, figures.STOP], ids=lambda figure: figure.row)
def test_the_figures_are_those_of_the_tables(figure: figures.Figure) -> None:
    row = re.search(rf"^\| {re.escape(figure.row)} \| inprocess \| \*\*([\d.]+)\*\*", TABLES, re.MULTILINE)
    assert row is not None and figure.median == float(row[1]) / 1e3


def test_the_sample_of_the_page_has_the_figures() -> None:
    (sample,) = re.findall(r"```text\n(inprocess doctor: .*?)```", PAGE, re.DOTALL)[:1]
    for each in TRIALS:
        (line,) = (line for line in sample.splitlines() if each.what in line)
        assert each.figure is None or line.endswith(f" {each.figure.median * 1e3:.0f} ms")


# --- a script -------------------------------------------------------------------------------------------------------


def test_a_script_is_examined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its arguments and as many ranks; what is found in it counts like the rest."""
    (script := tmp_path / "train.py").touch()
    asked: list[Any] = []

    def examine(command: list[str], nproc: int, progress: Callable[[str], None]) -> Iterable[Finding]:
        asked.append((command, nproc))
        return [Finding("script.x", "problem", "what", "why", "remedy", "train.py:7")]

    monkeypatch.setitem(sys.modules, "inprocess.doctor.script", types.SimpleNamespace(examine=examine))
    monkeypatch.setattr(checks.examine, "__defaults__", ((),))
    monkeypatch.setattr(trial, "run", lambda nproc, progress: iter(CLEAN))
    assert program.main(["--nproc", "2", "--json", "--", str(script), "--json", "--", "x"]) == 1
    assert asked == [([str(script), "--json", "--", "x"], 2)]
    told = json.loads(capsys.readouterr().out)
    assert [finding["where"] for finding in told["findings"]] == ["train.py:7"]
    assert {check.id for check in SCRIPT_CHECKS} <= set(told["checks"])


def test_a_script_that_cannot_be_tried_to_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was found until then is told."""
    (script := tmp_path / "train.py").touch()

    def examine(command: list[str], nproc: int, progress: Callable[[str], None]) -> Iterable[Finding]:
        yield Finding("script.x", "problem", "what", "why", "remedy", "train.py:7")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(sys.modules, "inprocess.doctor.script", types.SimpleNamespace(examine=examine))
    monkeypatch.setattr(checks.examine, "__defaults__", ((),))
    monkeypatch.setattr(trial, "run", lambda nproc, progress: iter(CLEAN))
    assert program.main(["--nproc", "2", "--json", "--", str(script)]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert [finding["where"] for finding in told["findings"]] == ["train.py:7"]
    assert "No space left on device" in told["skipped"][SCRIPT_CHECKS[0].id]
    assert "train.py was not tried to the end: [Errno 28] No space left on device" in err


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line now and then, so that a log of CI shows that it goes on."""
    times = [100.0]
    monkeypatch.setattr(progress.clock, "monotonic", lambda: times[-1])
    tell = program._teller(is_screen=False)
    for now, text in ((101.0, "first"), (110.0, "second"), (111.0, "third"), (120.0, ""), (121.0, "fourth")):
        times.append(now)
        tell(text)
    assert capsys.readouterr().err == "second\nfourth\n"


def test_options_and_step_reach_the_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks.examine, "__defaults__", (timeouts.CHECKS,))
    monkeypatch.setattr(trial, "run", lambda nproc, progress: iter(CLEAN))
    assert program.main(["--option", "soft_timeout=600", "--step", "0.5"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  timeouts.order: soft_timeout=600s must be less than hard_timeout=90s" in out
    assert program.main(["--step", "30"]) == 0
    assert "WARNING  timeouts.step: soft_timeout=60 s, and a step takes up to 30 s" in capsys.readouterr().out


def test_no_job_where_torch_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "train.py").touch()

    def missing(_: Settings) -> Iterable[Finding]:
        yield Finding("versions.torch", "problem", "none", "why", "remedy")

    monkeypatch.setattr(checks.examine, "__defaults__", ((Check("versions.torch", "", "", missing),),))
    assert program.main(["--json", "--", str(script)]) == 1
    told = json.loads(capsys.readouterr().out)
    skipped = {*(f"restart.{each.name}" for each in TRIALS), *(check.id for check in SCRIPT_CHECKS)}
    assert told["restarts"] == {} and set(told["skipped"]) == skipped
