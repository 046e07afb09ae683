"""torchrun's options mean the same: its documented examples, under this launcher."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import inprocess
from inprocess.exception import OptionError
from inprocess.launcher import arguments, script
from inprocess.launcher.arguments import GRACE_VARIABLE
from tests.harness.streams import full
from tests.launcher.harness import ROOT, WORKER, Hub, Launcher, free_port

Run = Callable[..., Launcher]
#: the last line of each refusal
HELP = "`inprocess run --help` has the options."
HASTY = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2"]


def finish(launcher: Launcher, hub: Hub, size: int, tell: str = "show hello") -> dict[int, dict[str, str]]:
    """Let all workers say something and exit with 0; their environments by rank."""
    workers = hub.group(size)
    for worker in workers:
        assert worker.ask(tell) == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0, launcher.err
    return {worker.rank: worker.env for worker in workers}


def test_standalone(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node=2")
    envs = finish(launcher, hub, 2)
    for rank, env in envs.items():
        assert env["LOCAL_RANK"] == str(rank)
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("2", "2", "0")
        assert (env["MASTER_ADDR"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")
        assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
    assert launcher.out.count("hello\n") == 2
    assert launcher.left() == []


def test_a_command_line_and_a_file_of_ft_launcher(start: Run, hub: Hub, tmp_path: Path) -> None:
    """The command's name is replaced, and nothing else."""
    file = tmp_path / "ft.yaml"
    file.write_text("fault_tolerance: {rank_section_timeouts: {step: 60}, segment: 4, enable_nic_monitor: false}\n")
    command = ["--nnodes=1", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    command += ["--max_restarts=2", "--ft-restart_policy=any-failed", f"--ft-cfg_path={file}", "--term-timeout=60"]
    command += ["--ft-rank_out_of_section_timeout=", "--ft_cycle_info_dir=/nowhere", "--ft-rdzv-impl=barrier"]
    launcher = start(*command, WORKER, hub.path)
    finish(launcher, hub, 2)
    told = [line.partition("] ")[2] for line in launcher.err.splitlines() if "does nothing here" in line]
    domains = "rank_assignment=Tree([...]) of the Wrapper, with a Layer for the domains"
    assert told == [
        f"--ft-cfg-path={file}: segment does nothing here; in its place: {domains}",
        "--term-timeout does nothing here; in its place: --shutdown-timeout",
        "--ft-rdzv-impl does nothing here; in its place: --rdzv-backend",
        "--ft-cycle-info-dir does nothing here; in its place: --run-dir",
    ]


def test_one_node_without_an_address(start: Run, hub: Hub) -> None:
    """`torchrun --nproc-per-node N script`: a free port is found."""
    finish(start("--nproc-per-node", "1", WORKER, hub.path), hub, 1)


def test_variables_stand_in_for_options(start: Run, hub: Hub) -> None:
    finish(start("--standalone", WORKER, hub.path, PET_NPROC_PER_NODE="2"), hub, 2)


def test_no_python(start: Run, hub: Hub) -> None:
    command = ["--standalone", "--no-python", "/bin/sh", "-c", 'exec python "$0" "$@"', WORKER, hub.path, "--its=1"]
    launcher = start(*command)
    worker = hub.next()
    assert worker.argv == ["--its=1"]
    worker.tell("exit 0")
    assert launcher.finish() == 0


def test_module(start: Run, hub: Hub) -> None:
    finish(start("--standalone", "-m", "tests.launcher.worker", hub.path), hub, 1)


def test_run_path(start: Run, hub: Hub) -> None:
    launcher = start("--standalone", "--run-path", "--start-method", "fork", WORKER, hub.path, "wrapped")
    hub.next().tell("kill 9")
    assert launcher.finish() == 1
    assert "signal SIGKILL" in launcher.err


@pytest.mark.parametrize("option", ["--redirects", "--tee"])
def test_log_files(run: Run, hub: Hub, tmp_path: Path, option: str) -> None:
    """A worker that is started again writes beside its predecessor, whose last words stay."""
    launcher = run("--nproc-per-node", "2", "--log-dir", str(tmp_path), option, "3")
    first = hub.group(2)
    for worker in first:
        assert worker.ask(f"show from {worker.rank}") == {"shown": True}
    first[1].tell("exit 1")
    again = hub.next()
    assert again.ask("show another")["shown"]
    for worker in (first[0], again):
        worker.tell("exit 0")
    assert launcher.finish() == 0
    files = {str(path.relative_to(tmp_path)).partition("/")[2]: path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "from 0\n",
        "attempt_0/0/stderr.log": "error: from 0\n",
        "attempt_0/1/stdout.log": "from 1\n",
        "attempt_0/1/stderr.log": "error: from 1\n",
        "attempt_0/1/restart_1/stdout.log": "another\n",
        "attempt_0/1/restart_1/stderr.log": "error: another\n",
    }
    assert launcher.left() == []
    shown = [f"[default{rank}]:{text}" for rank, text in ((0, "from 0"), (1, "from 1"), (1, "another"))]
    assert sorted(launcher.out.splitlines()) == (sorted(shown) if option == "--tee" else [])


def test_local_ranks_filter(run: Run, hub: Hub) -> None:
    launcher = run("--nproc-per-node", "2", "--local-ranks-filter", "1")
    workers = hub.group(2)
    for worker in workers:
        assert worker.ask(f"show from {worker.rank}") == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0
    assert launcher.out == "from 1\n"


def test_lines_of_all_workers_in_one_file(run: Run, hub: Hub, tmp_path: Path) -> None:
    options = ["--log-dir", str(tmp_path), "--tee", "3", "--duplicate-stdout-filters", "apple,plum"]
    launcher = run("--nproc-per-node", "2", *options)
    workers = hub.group(2)
    for worker in workers:
        for text in ("an apple", "a pear"):
            assert worker.ask(f"show {text}") == {"shown": True}
        worker.tell("exit 0")
    assert launcher.finish() == 0
    (path,) = tmp_path.rglob("filtered_stdout.log")
    assert sorted(path.read_text().splitlines()) == ["[default0]:an apple", "[default1]:an apple"]


def test_a_standard_output_that_nobody_reads(tmp_path: Path) -> None:
    """It is in the files, and a line says so."""
    script = tmp_path / "script.py"
    script.write_text("print('x' * 20_000)\n")
    options = ["--standalone", "--nproc-per-node", "2", "--run-dir", "none", "--tee", "3", "--log-dir", str(tmp_path)]
    command = [sys.executable, "-m", "inprocess.run", *options, str(script)]
    with full() as stdout:
        done = subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [path.stat().st_size for path in tmp_path.rglob("stdout.log")] == [20_001] * 2
    assert f"is not shown, as nobody reads it; all of it is in {tmp_path}/".encode() in done.stderr


def test_prefix_of_lines(run: Run, hub: Hub) -> None:
    launcher = run("--tee", "1", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${rank}>")
    finish(launcher, hub, 1)
    assert "<default 0>hello" in launcher.out


def test_limit_of_descriptors(run: Run, hub: Hub) -> None:
    """Raised in the launcher, where all workers' connections end; a worker has what it would have anyway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    launcher = run()
    worker = hub.next()
    assert resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert worker.ask("limits") == {"limits": [soft, hard]}
    worker.tell("exit 0")
    assert launcher.finish() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restart-policy", "some"], "invalid choice: 'some'"),
        (["--restart-backoff", "-1"], "--restart-backoff=-1: pass a number of seconds, 0 or more"),
        (["--max-restarts", "-1"], "--max-restarts=-1: must be 0 or more"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "2"], "the node rank is 2"),
        (["--nproc-per-node", "many"], "--nproc-per-node=many: Unsupported nproc_per_node value: many"),
        (["--nproc-per-node", "0"], "--nproc-per-node=0: must be 1 or more"),
        (["--tee", "7"], "7 does not match"),
        (["--nnodes", "some"], "--nnodes=some: pass a number of nodes, 1 or more, or MIN:MAX"),
        (["--nnodes", "3:2"], "--nnodes=3:2: pass a number of nodes"),
        (["--event-log-handler", "letter"], "--event-log-handler=letter is not registered"),
        (["--local-addr", "no-host.invalid"], "--local-addr=no-host.invalid: does not resolve on this node"),
        (["--rdzv-backend", "c10b"], "--rdzv-backend=c10b is unknown: did you mean 'c10d'?"),
        (["--rdzv-backend", "paper"], "--rdzv-backend=paper is unknown: pass one of c10d, etcd, etcd-v2, static"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "host:x"], "--rdzv-endpoint=host:x): The port number"),
        ([*HASTY, "--rdzv-endpoint", "127.0.0.1:1"], "keep_alive_max_attempt is 2 s, and a node"),
        (["--nproc-per-mode", "2"], "unknown option '--nproc-per-mode': did you mean '--nproc-per-node'?"),
        (["--restart_polcy=any-failed"], "unknown option '--restart_polcy': did you mean '--restart-policy'?"),
        (["--xyz"], "unknown option '--xyz'\n"),
        (["--log-dir", "/proc/no\x1b[31m"], r"--log-dir=/proc/no\x1b[31m cannot be made or opened: "),
        (["--max-restarts", "some"], "inprocess run: --max-restarts: invalid int value: 'some'"),
        (["-t"], "inprocess run: --tee: "),
    ],
)
def test_wrong_options(start: Run, options: list[str], message: str) -> None:
    """Three lines: what is wrong, the form of the command, where its options are."""
    launcher = start(*options, *([] if options == ["-t"] else [WORKER]))
    assert launcher.finish() == 2
    assert message in launcher.err
    assert [line.partition(":")[0] for line in launcher.err.splitlines()] == ["inprocess run", "usage", HELP]
    assert launcher.left() == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--monitor-interval", value) for value in ("-1", "0", "nan", "inf", "1e+06")),
        ("--shutdown-timeout", "-5"),
        *((GRACE_VARIABLE, value) for value in ("abc", "-1", "2.5")),
    ],
)
def test_wrong_durations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    """With the first three the loop never paused."""
    if option == GRACE_VARIABLE:
        monkeypatch.setenv(option, value)
    with pytest.raises(SystemExit) as ended:
        arguments.parse([WORKER] if option == GRACE_VARIABLE else [option, value, WORKER])
    assert ended.value.code == 2
    assert f"inprocess run: {option}={value}: pass a " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_RESTART_POLICY", "minhealthy", "PET_RESTART_POLICY=minhealthy is unknown: did you mean 'min-healthy'?"),
        ("PET_START_METHOD", "", "PET_START_METHOD= is unknown: pass one of spawn, fork, forkserver"),
    ],
)
def test_a_variable_with_another_value_than_its_option_can_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        arguments.parse([WORKER])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    monkeypatch.setenv(name, "any-failed" if name == "PET_RESTART_POLICY" else "fork")
    arguments.parse([WORKER])


def test_an_option_comes_before_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRACE_VARIABLE, "abc")
    assert arguments.parse(["--shutdown-timeout", "0", WORKER]).shutdown_timeout == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no script is named"),
        (["tests/launcher/worke.py"], "script 'tests/launcher/worke.py' in {root}: No such file or directory: did you"),
        (["/no/script.py"], "script '/no/script.py': No such file or directory\n"),
        (["tests/launcher"], "script 'tests/launcher' is a folder without a __main__.py"),
        (["--run-path", "/no/script.py"], "script '/no/script.py': No such file or directory"),
        (["--no-python", "no-such-program"], "no program 'no-such-program' can be executed"),
        (["-m", "nosuchmodule.train"], "no module named 'nosuchmodule'"),
    ],
)
def test_what_is_missing_is_named_before_workers_start(start: Run, given: list[str], message: str) -> None:
    launcher = start("--nproc-per-node", "2", *given)
    assert launcher.finish() == 2
    assert message.format(root=ROOT) in launcher.err
    assert [line.partition(":")[0] for line in launcher.err.splitlines()] == ["inprocess run", "usage", HELP]
    assert launcher.left() == []


@pytest.mark.parametrize(("python", "is_there"), [("/no/python", False), ("no-such-python", False), ("sh", True)])
def test_an_interpreter_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, python: str, is_there: bool) -> None:
    """Whatever it is to run. It ended with a traceback."""
    monkeypatch.setenv("PYTHON_EXEC", python)
    with contextlib.nullcontext() if is_there else pytest.raises(OptionError, match=f"PYTHON_EXEC={python} cannot be"):
        script.check(arguments.parse(["train_${local_rank}.py"]))
    script.check(arguments.parse(["--no-python", "sh"]))


def test_a_script_that_is_a_folder(start: Run, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(Path(WORKER).read_text())
    finish(start("--standalone", str(tmp_path), hub.path), hub, 1)


def test_too_few_nodes_come(start: Run) -> None:
    with free_port() as port:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=1"]
        launcher = start("--nnodes", "2", *where, WORKER)
        assert launcher.finish() == 1
    last = launcher.err.splitlines()[-1]
    assert last.startswith("inprocess run: this node did not meet the others: too few nodes came in time"), launcher.err
    assert "Traceback" not in launcher.err


def test_a_rendezvous_that_cannot_be_reached(start: Run) -> None:
    """A host without a name server: told at once; and in the end one line."""
    endpoint = ["--rdzv-endpoint", "no-host.invalid:29400", "--rdzv-conf", "timeout=1,read_timeout=1"]
    launcher = start("--nnodes", "2", "--rdzv-backend", "c10d", *endpoint, WORKER)
    launcher.expect("the host of the rendezvous, no-host.invalid, is unknown")
    launcher.signal(signal.SIGTERM)
    assert launcher.finish() == 128 + signal.SIGTERM
    assert "Traceback" not in launcher.err


@pytest.mark.parametrize(
    ("size", "given", "found"),
    [
        (2, {}, ("1", "ERROR")),
        (1, {}, ("", "ERROR")),
        (2, {"OMP_NUM_THREADS": "3", "TORCH_CPP_LOG_LEVEL": "INFO"}, ("3", "INFO")),
    ],
)
def test_variables_that_keep_torch_quiet(
    run: Run, hub: Hub, size: int, given: dict[str, str], found: tuple[str, str]
) -> None:
    """A user's own go before."""
    launcher = run("--nproc-per-node", str(size), **given)
    envs = finish(launcher, hub, size)
    assert [(env["OMP_NUM_THREADS"], env["TORCH_CPP_LOG_LEVEL"]) for env in envs.values()] == [found] * size
    assert "OMP_NUM_THREADS" not in launcher.err


def test_little_is_printed_but_the_workers_own_output(tmp_path: Path) -> None:
    """The launcher starts anew: in the other tests torch was imported before, without the variables."""
    script = tmp_path / "hello.py"
    # one write each: lines of two processes must not mix
    script.write_text(r"import os; os.write(1, b'hello\n'); os.write(2, b'error: hello\n')")
    env = {name: text for name, text in os.environ.items() if name not in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")}
    command = [sys.executable, "-m", "inprocess", "run", "--standalone", "--nproc-per-node", "2", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert (found.returncode, found.stdout) == (0, "hello\n" * 2), found
    first, *others, last = found.stderr.splitlines()
    assert others == ["error: hello"] * 2, found.stderr
    assert "node 0 of 1 starts ranks 0-1 of 2" in first and "2 of 2 workers of this node finished" in last


def test_the_node_rank_comes_from_slurm(start: Run, hub: Hub) -> None:
    with free_port() as port:
        common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), WORKER, hub.path]
        launchers = [start(*common, SLURM_PROCID=str(rank)) for rank in (1, 0)]
        workers = hub.group(2)
    assert [(worker.rank, worker.env["GROUP_RANK"]) for worker in workers] == [(0, "0"), (1, "1")]
    for worker in workers:
        worker.tell("exit 0")
    assert [launcher.finish() for launcher in launchers] == [0, 0]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from inprocess import __main__ as command

    assert command.main(["--help"]) == 0
    assert "  run " in capsys.readouterr().out
    assert command.main(["--version"]) == 0
    torch = version("torch").replace("+", r"\+")
    assert re.fullmatch(rf"inprocess {inprocess.__version__} \(torch {torch}, Python \S+\)\n", capsys.readouterr().out)
    assert command.main([]) == 2
    assert "  run " in capsys.readouterr().err
    assert os.environ.get("INPROCESS_RESTART") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rnu", "unknown command 'rnu': did you mean 'run'?"),
        ("walk", "unknown command 'walk'"),
        ("version", "unknown command 'version': did you mean '--version'?"),
        ("--vresion", "unknown option '--vresion': did you mean '--version'?"),
        ("train.py", "unknown command 'train.py': to run a script, `inprocess run train.py`"),
    ],
)
def test_a_wrong_command(capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    from inprocess import __main__ as command

    assert command.main([given]) == 2
    lines = [f"inprocess: {message}", "usage: inprocess COMMAND ...", "`inprocess --help` has the commands."]
    assert capsys.readouterr().err.splitlines() == lines


def test_python_m_inprocess() -> None:
    """The same command; it needs no torch."""
    for options, torch in ([], f"torch {version('torch')}"), (["-S"], "no torch"):
        command = [sys.executable, *options, "-m", "inprocess", "--version"]
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout.startswith(f"inprocess {inprocess.__version__} ({torch}, Python ")


def test_without_torch() -> None:
    command = [sys.executable, "-S", "-m", "inprocess", "run", "train.py"]  # -S: without installed packages
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 1
    assert found.stderr.startswith("inprocess run: torch is not installed for "), found.stderr
    assert found.stderr.count("\n") == 1
