"""Programs on real ranks: each fault where it is to strike, what a result says, and what is wrong with a run."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from inprocess.exception import OptionError
from inprocess.testing import (
    At,
    Command,
    Deadline,
    Exit,
    Fault,
    Hang,
    HoldGIL,
    HostLoss,
    Job,
    Kill,
    NetworkCut,
    Raise,
    Segfault,
    SlowDown,
    Stop,
    StoreLoss,
    Terminate,
    leaks,
    process,
    random_faults,
)
from inprocess.testing.coordinates import PHASES

from . import programs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: a hang is noticed after two seconds; what stands still is killed after four
HASTY = {"soft_timeout": 2, "hard_timeout": 4, "heartbeat_timeout": 3}


@pytest.fixture
def job(ranks, tmp_path):
    """`ranks` with a folder for checkpoints."""
    return functools.partial(ranks, env={"CHECKPOINTS": str(tmp_path)})


def place(text: str, function: str) -> str:
    """Where a function of `programs` has this text, as failures name it."""
    lines = Path(programs.__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))
    return f"tests/testing/programs.py:{number} in {function}"


def test_two_faults(job):
    faults = {At(rank=1, step=3): Kill(), At(rank=0, step=9): Raise(OSError)}
    result = job(4).run(programs.train, 20, faults=faults)
    assert result.same_pids and result.world_sizes == [4, 3, 3] and result.restarts == 2
    assert result.exit_codes == [0, -signal.SIGKILL, 0, 0] and result.exceptions == [None] * 4
    assert result.struck == ["At(rank=0, step=9)", "At(rank=1, step=3)"]
    assert result.values[1] is None and torch.equal(result.values[0], torch.full((4,), 190.0))
    result.assert_resumed_from(5)


def test_the_same_result_as_without_a_fault(job, tmp_path):
    reference = job(2).run(programs.train, 8)
    (tmp_path / "state.pt").unlink()
    result = job(2).run(programs.train, 8, faults={At(1, step=6): Raise()})
    result.assert_same_result(reference)
    assert result.world_sizes == [2, 2] and reference.restarts == 0
    with pytest.raises(AssertionError, match=r"the value of rank 0, torch.float32\[4\], differs in 4 of 4 elements"):
        result.assert_same_result(torch.zeros(4))


ENDS = {Kill(): -9, Kill(signal.SIGTERM): -15, Segfault(): -11, Exit(3): 3, HostLoss(): -9}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ENDS, ids=repr)
def test_a_process_ends(job, fault, rank):
    result = job(3, options=HASTY).run(programs.train, 12, faults={At(rank, step=7): fault})
    assert result.exit_codes[rank] == ENDS[fault] and result.same_pids and result.world_sizes == [3, 2]
    result.assert_resumed_from(5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_asked_to_leave(job, rank):
    result = job(3, options=HASTY).run(programs.until_whole, 2, faults={At(rank, step=7): Terminate()})
    assert result.exit_codes[rank] == 143 and result.exceptions[rank] == "Preempted"
    assert result.same_pids and result.world_sizes == [3, 2]


def test_hosts_are_lost(job):
    faults = {At(0, step=2): HostLoss(ranks=(3,))}
    result = job(4, options=HASTY).run(programs.train, 12, faults=faults)
    assert result.exit_codes == [-9, 0, 0, -9] and result.world_sizes == [4, 2]


def test_a_deadly_signal_in_the_thread_that_aborts(job):
    """The rank would leave in time by its handler, and that thread wait for ever."""
    faults = {At(0, step=2): Raise(), At(1, phase="abort"): Kill(signal.SIGTERM)}
    result = job(3).run(programs.train, 12, faults=faults)
    assert result.exit_codes == [0, -signal.SIGTERM, 0] and result.world_sizes == [3, 2]


@pytest.mark.parametrize("fault", [Hang(), Hang("lock"), StoreLoss()], ids=repr)
def test_nobody_ends(job, fault):
    result = job(3, options=HASTY).run(programs.train, 12, faults={At(0, step=7): fault})
    assert result.exit_codes == [0, 0, 0] and result.same_pids and result.world_sizes == [3, 3]


@pytest.mark.parametrize("fault", [Stop(), HoldGIL()], ids=repr)
def test_who_stands_still_is_killed(job, fault):
    result = job(3, options=HASTY).run(programs.train, 12, faults={At(1, step=7): fault})
    assert result.exit_codes == [0, -signal.SIGKILL, 0] and result.same_pids and result.world_sizes == [3, 2]


def test_a_network_that_is_cut(job):
    result = job(3, options=HASTY).run(programs.train, 12, faults={At(2, step=7): NetworkCut()})
    assert result.exit_codes[:2] == [0, 0] and result.world_sizes == [3, 2]


def test_a_network_that_comes_back_in_time(job):
    options = HASTY | {"soft_timeout": 20, "hard_timeout": 25, "heartbeat_timeout": 15}
    result = job(3, options=options).run(programs.train, 12, faults={At(2, step=7): NetworkCut(0.5)})
    assert result.exit_codes == [0, 0, 0] and result.world_sizes == [3]


def test_a_rank_that_is_slow(job):
    result = job(2).run(programs.train, 8, faults={At(1, step=2): SlowDown(0.1, steps=3)})
    times = [next(e["t"] for e in result.ranks[1].of(name)) for name in ("fault", "leave")]
    assert times[1] - times[0] >= 0.3 and result.restarts == 0


#: a phase -> whether a fault restarts before it
RESTARTS = dict.fromkeys(("abort", "finalize", "health check after a fault", "end round"), True)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("failover", "leave")])
def test_a_phase(job, phase):
    faults = {At(1, phase=phase): Kill()} | ({At(0, step=1): Raise()} if phase in RESTARTS else {})
    result = job(3).run(programs.train, 4, faults=faults)
    assert result.exit_codes == [0, -9, 0]
    (struck,) = result.ranks[1].of("fault")
    assert f"phase {phase!r}" in struck["place"] and (struck["iteration"] in (None, 0))


@pytest.mark.parametrize("phase", ["initialize", "health check", "run"])
def test_raised_where_the_program_runs(job, phase):
    result = job(2).run(programs.train, 4, faults={At(1, phase=phase): Raise(OSError("of a hook"))})
    assert result.exit_codes == [0, 0] and "OSError: of a hook" in result.ranks[1].log


def test_a_place_with_a_name(job):
    faults = {At(0, label="save"): Kill(), At(1, label="save", iteration=1): Raise()}
    result = job(3).run(programs.train, 12, faults=faults)
    assert result.world_sizes == [3, 2, 2]
    result.assert_resumed_from(0)


def test_in_the_middle_of_a_file(job, tmp_path):
    result = job(2).run(programs.train, 12, faults={At(0, file="state.pt.new", step=8): Kill()})
    assert result.world_sizes == [2, 1]
    result.assert_resumed_from(5)


def test_a_file_by_its_keyword(ranks, tmp_path):
    at = At(0, file="state.pt", step=1)
    result = ranks(1).run(programs.saves_by_keyword, str(tmp_path), faults={at: Raise()})
    assert result.struck == [repr(at)] and result.world_sizes == [1, 1]


def test_a_name_of_every_event(ranks):
    with pytest.raises(AssertionError, match=r"OptionError: here\('x', event=\.\.\.\): each event has its own event"):
        ranks(1).run(programs.says_event)


def test_random(job):
    faults = random_faults(n=4, ranks=4, steps=3)
    result = job(4).run(programs.train, 60, faults=faults)
    assert result.restarts == 4 and len(result.struck) == 4


def test_a_replacement(ranks):
    result = ranks(3, respawn=1).run(programs.until_whole, 3, faults={At(1, step=2): Kill()})
    assert result.world_sizes[0] == result.world_sizes[-1] == 3 and not result.same_pids
    assert result.exit_codes == [0, -9, 0, 0] and [each.rank for each in result.ranks] == [0, 1, 2, 1]


def test_a_fault_of_a_replacement(ranks):
    faults = {At(1, step=2): Kill(), At(1, step=0, iteration=2): Kill()}
    result = ranks(3, respawn=2).run(programs.until_whole, 3, faults=faults)
    assert [each.rank for each in result.ranks if each.exitcode] == [1, 1] and result.world_sizes[-1] == 3


def test_a_replacement_that_comes_too_late(job):
    faults = {At(1, phase="completion"): Kill()}
    assert job(3, respawn=1).run(programs.train, 3, faults=faults).exit_codes[:3] == [0, -9, 0]


def test_what_grows(ranks, tmp_path):
    faults = {At(0, step=1, iteration=i): Raise() for i in range(2)}
    result = ranks(1).run(programs.leaks, str(tmp_path), 3, faults=faults)
    with pytest.raises(AssertionError) as failure:
        result.assert_nothing_grows()
    said = str(failure.value)
    assert "threads named 'prefetch-N': 0, 1, 2 at the entries of the function; the last was made in" in said
    assert f"descriptors of {tmp_path}/log: 0, 1, 2" in said
    assert "the list tests.testing.programs._open: 0, 1, 2" in said
    assert said.count(place("threading.Thread(", "leaks")) == 1 and said.count(place("_open.append(", "leaks")) == 2


def test_a_function_that_calls_one(job):
    assert torch.equal(job(1).run(programs.prepared, 3, offset=1).values[0], torch.full((4,), 4.0))
    assert torch.equal(job(1).run(functools.partial(programs.prepared, 3), offset=2).values[0], torch.full((4,), 5.0))


def test_a_method(ranks):
    assert ranks(2).run(programs.Trainer(5).fit, 3).values == [8, 8]


def test_the_same_fault_many_times(ranks):
    """An injected error is no bug of the program."""
    faults = {At(1, step=1, iteration=i): Raise() for i in range(5)}
    assert ranks(2).run(programs.optimized, 3, faults=faults).restarts == 5


def test_what_is_kept_in_a_dict(ranks):
    result = ranks(2).run(programs.keeps_in_a_dict, 3, faults={At(1, step=1): Raise()}, check=False)
    assert f"is in tests.testing.programs._kept['group'], in {place('_kept[', 'keeps_in_a_dict')}" in result.problems[0]
    with pytest.raises(AssertionError, match=r"the dict tests.testing.programs._kept: 0, 3, 4"):
        result.assert_nothing_grows()


def test_a_script(ranks, tmp_path):
    result = ranks(2).run(HERE / "script.py", tmp_path / "said", 7, faults={At(1, step=2): Raise()})
    assert result.world_sizes == [2, 2] and result.exit_codes == [0, 0]
    assert (tmp_path / "said").read_text() == f"7 {HERE / 'script.py'}"


def test_without_pytest(tmp_path):
    job = Job(2, env={"CHECKPOINTS": str(tmp_path)})
    assert job.run(programs.train, 3).exit_codes == [0, 0]
    with pytest.raises(AssertionError, match=r"(?s)never struck.*--- phases"):
        job.run(programs.train, 3, faults={At(1, step=50): Kill()})


# --- what is wrong


def test_a_fault_that_never_struck(job):
    with pytest.raises(AssertionError) as failure:
        job(2).run(programs.train, 3, faults={At(1, step=50): Kill()})
    assert str(failure.value) == "At(rank=1, step=50): Kill() never struck: rank 1 made 3 pings in iteration 0"


NEVER = {
    "label": (At(1, label="svae"), "rank 1 reached these labels: 'resume' (1 times)"),
    "file": (At(0, file="*.ckpt"), "rank 0 wrote no file of that name by torch.save() or open()"),
    "iteration": (At(1, step=2, iteration=2), "rank 1 was in iterations 0 only"),
    "phase": (At(1, phase="end round"), "rank 1 was in these phases only: join, assign ranks, start round"),
}


@pytest.mark.parametrize("name", NEVER)
def test_why_it_never_struck(job, name):
    at, says = NEVER[name]
    with pytest.raises(AssertionError) as failure:
        job(2).run(programs.train, 6, faults={at: Raise() if name != "phase" else Kill()})
    assert says in str(failure.value)


def test_a_child_is_left(ranks):
    with pytest.raises(AssertionError, match=r"^still running: pid \d+: \w sleep 60 $"):
        ranks(1).run(programs.leaves_a_child)


def test_a_program_that_raises(job):
    with pytest.raises(AssertionError) as failure:
        job(2).run(programs.train, "x", faults={At(1): Raise(OSError("full"))})
    said = str(failure.value)
    assert (
        f"TypeError: 'str' object cannot be interpreted as an integer, in {place('for step in range(start', 'train')}"
        in said
    )
    assert "\n  RestartAbort: the same error 3 times in a row" in said


def test_without_the_check(ranks):
    result = ranks(1).run(programs.exits, 3, check=False)
    assert result.exit_codes == [3] and result.exceptions == ["SystemExit"]
    assert result.problems == [f"rank 0 ended with SystemExit, in {place('sys.exit(code)', 'exits')}: 3"]


@pytest.mark.parametrize("code", ["0", "None"])
def test_a_script_that_ends_with_sys_exit(ranks, code):
    result = ranks(1).run(HERE / "script_that_exits.py", code)
    assert result.exit_codes == [0] and result.exceptions == [None]
    result.assert_same_result(None)


def test_a_temporary_file_is_a_problem_but_that_of_a_killed_rank(ranks):
    faults = {At(0, step=1): Kill()}
    assert ranks(2).run(programs.makes_files, True, faults=faults).world_sizes == [2, 1]
    problems = ranks(2).run(programs.makes_files, False, faults=faults, check=False).problems
    # rank 1's, of its last iteration, and of the one before if that had made one when it was interrupted
    assert {problem.rpartition("/")[0] for problem in problems} == {"file left in the temporary directory: tmp/1"}


def test_children_are_started_as_in_any_program(ranks):
    """Not as a rank is: each worker of a DataLoader would import torch."""
    assert ranks(1).run(programs.start_method).values == multiprocessing.get_all_start_methods()[:1]  # the default


def test_sigterm_that_is_handled(ranks):
    assert ranks(1).run(programs.handles_sigterm, faults={At(0, step=3): Terminate()}).values == [1]


def test_groups_that_are_made_outside(job):
    with pytest.raises(AssertionError) as failure:
        job(2).run(programs.group_outside, 3)
    said = str(failure.value)
    assert "made outside the wrapped function, in tests/testing/programs.py:" in said and " in group_outside: " in said


def test_nothing_is_wrapped(ranks):
    with pytest.raises(AssertionError, match=r"called no function that .* has wrapped"):
        ranks(1).run(programs.nothing_wrapped)


def test_a_value_that_cannot_travel(ranks):
    result = ranks(1).run(programs.unpicklable)
    with pytest.raises(AssertionError, match=r"rank 0 returned what cannot be pickled: generator"):
        _ = result.values


def test_a_store_that_nobody_serves(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"StoreLoss\(\): no process of this run serves the store"):
        ranks(1).run(programs.in_a_file, str(tmp_path), faults={At(0, step=0): StoreLoss()})


def test_the_deadline(job):
    job = job(2, deadline=4)
    with pytest.raises(
        Deadline, match=r"still ran: 0, 1; the deadline was 4 s\. Only a timeout ends At\(.*Hang.*soft_timeout"
    ):
        job.run(programs.train, 8, faults={At(1, step=3): Hang("recv")})
    story = job.stories[0]
    assert story.index("--- faults") < story.index("--- phases") < story.index("--- stacks") < story.index("--- last")
    stacks = story.partition("--- stacks")[2].partition("--- last")[0]
    assert "in all_reduce" in stacks and stacks.count("programs.py") == 2 and "loop.py" not in stacks


def local(call=None):
    """At the top of its module, so that it can be found."""


WRONG = {
    "no ranks": (lambda ranks: ranks(0), r"ranks\(0\): the number of ranks must be at least 1"),
    "deadline": (lambda ranks: ranks(1, deadline=0), "deadline=0 must be greater than zero seconds"),
    "deadline in text": (lambda ranks: ranks(1, deadline="60"), "deadline='60' must be greater than zero seconds"),
    "no deadline": (lambda ranks: ranks(1, deadline=float("inf")), "deadline=inf must be greater than zero seconds"),
    "respawn": (lambda ranks: ranks(1, respawn=-1), "respawn=-1 is not a number of ranks from 0 on"),
    "variable": (lambda ranks: ranks(1, env={"N": 4}), r"ranks\(1\): env=\{'N': 4\}: variables are text"),
    "variable of a command": (
        lambda ranks: Command([str(HERE / "script.py")], 0.0, env={"N": 4}),
        r"env=\{'N': 4\}: variables are text",
    ),
    "option": (
        lambda ranks: ranks(1, options={"soft_timeot": 1}).run(local),
        r"options=\{'soft_timeot': \.\.\.\} is no option of Wrapper: did you mean 'soft_timeout'",
    ),
    "lambda": (lambda ranks: ranks(1).run(lambda: 1), "define it at the top level of its module"),
    "hook": (
        lambda ranks: ranks(1, options={"initialize": lambda state: state}).run(local),
        "options=.* cannot be pickled for the ranks",
    ),
    "inherited": (
        lambda ranks: ranks(1).run(programs.Later.make, 1),
        r"run\(Trainer.make\): .* tests.testing.programs.Trainer.make is not this one",
    ),
    "wrapped": (lambda ranks: ranks(1).run(functools.wraps(local)(lambda: 1)), r"run\(local\): .* wrapped on the spot"),
    "no function": (lambda ranks: ranks(1).run(3), r"run\(3\): pass a function of a module, or the path of a script"),
    "no script": (lambda ranks: ranks(1).run("no_such.py"), "there is no such script: .*no_such.py"),
    "script": (lambda ranks: ranks(1).run(HERE / "script.py", steps=3), "a script has no keyword arguments: steps"),
    "lock": (lambda ranks: ranks(1).run(local, (n for n in ())), "cannot be pickled for the ranks: cannot pickle"),
    "no exception": (lambda ranks: Raise("full"), r"Raise: 'full' is no exception: write Raise\(ValueError, 'full'\)"),
    "slow": (lambda ranks: SlowDown(-1), "seconds must not be negative"),
    "folder": (lambda ranks: At(0, file="a/*.pt"), "patterns match the name without its folder"),
    "label": (lambda ranks: At(0, label=""), "label='' is not a text"),
    "fault": (
        lambda ranks: ranks(1).run(local, faults={At(0): Fault()}),
        r"its class needs a method strike\(context\)",
    ),
    "key": (lambda ranks: ranks(1).run(local, faults={1: Kill()}), r"the key says where, as in At\(rank=1, step=3\)"),
    "class": (lambda ranks: ranks(1).run(local, faults={At(0): Kill}), r"is no fault: write Kill\(\)"),
    "rank": (lambda ranks: ranks(2).run(local, faults={At(2): Kill()}), r"At\(rank=2\): there are ranks 0 to 1"),
    "raise": (
        lambda ranks: ranks(1).run(local, faults={At(0, phase="join"): Raise()}),
        "needs a phase in which code of the program runs in the main thread: 'initialize'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be(ranks, name):
    does, says = WRONG[name]
    with pytest.raises(OptionError, match=says):
        does(ranks)


def test_nothing_is_left_where_the_first_rank_does_not_start(tmp_path, monkeypatch):
    """Ctrl-C comes while the server imports torch."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("inprocess.testing.run.Run._start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Job(2).run(programs.train, 1)
    assert list(tmp_path.iterdir()) == []


# --- what belongs to a run

NEVER_REAPS = """
import os, sys
child = os.fork() or os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(flush=True)
sys.stdin.read()
"""
LEAVES_A_DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture
def number():
    return process.new_mark()


def marked(source: str, number: int) -> subprocess.Popen[bytes]:
    source = f"from inprocess.testing import process\nprocess.mark({number})\n{source}"
    return subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, **PIPES)


def test_a_dead_process_that_is_not_ours_to_reap(number):
    """It is not waited for while its parent lives and does not reap it. Then it is ours."""
    with marked(NEVER_REAPS, number) as parent:
        assert parent.stdout.readline() == b"\n"
        (dead,) = leaks.children_of(parent.pid)
        assert process.left_by([parent.pid], number + 1) == []
        assert leaks.command_of(dead).startswith("Z")
    assert process.reap(partial(process.left_by, (), number), time.monotonic() + 5) == []
    assert dead not in leaks.children_of(os.getpid())


def test_a_daemon_belongs_to_the_run_in_which_it_was_started(number):
    with marked(LEAVES_A_DAEMON, number) as parent:
        daemon = int(parent.stdout.readline())
        assert parent.wait() == 0
        assert process.left_by((), number) == [daemon] and process.left_by((), number + 1) == []
        (late,) = process.reap(partial(process.left_by, (), number), time.monotonic())
        assert late.startswith(f"pid {daemon}: ")
    assert daemon not in leaks.children_of(os.getpid())


def test_processes_of_the_test_itself_are_left_alone(launch, tmp_path):
    """Which were started since the run began: below this process, or below another one of the test's."""
    os.mkfifo(tmp_path / "end")
    job = launch(waits_for_a_writer, 1, args={"pipe": str(tmp_path / "end")})
    job.wait_event("waits")
    with marked("import subprocess; subprocess.run(['cat'])", 1) as other:
        cat = _first_child(other.pid)
        (tmp_path / "end").write_text("")
        job.wait()
        assert other.poll() is None and leaks.children_of(other.pid) == [cat]


def waits_for_a_writer(context):
    context.emit("waits")
    Path(context.args["pipe"]).read_text()


def _first_child(pid: int) -> int:
    end = time.monotonic() + 20
    while not (found := leaks.children_of(pid)):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found[0]


def test_a_command_ends_with_all_that_it_has_started(command, tmp_path):
    daemon = LEAVES_A_DAEMON.replace("sys.stdin.read()", "os.closerange(0, 3); signal.pause()")
    (tmp_path / "daemon.py").write_text(f"import signal\n{daemon}")
    program = command("daemon.py", folder=tmp_path)
    assert program.finish() == 0
    pid = int(program.out)
    assert leaks.command_of(pid) != "gone"
    program.close()
    assert leaks.command_of(pid) == "gone"


# --- a command


def test_what_a_command_prints(command, tmp_path):
    """Whatever bytes these are, and also what it says at its very end."""
    (tmp_path / "noisy.py").write_text(
        "import atexit, sys\natexit.register(print, 'at exit')\nsys.stdout.buffer.write(b'\\xff\\n')\n1 / 0\n"
    )
    program = command("noisy.py", folder=tmp_path)
    assert program.finish() == 1
    assert program.out == "\ufffd\nat exit\n" and "ZeroDivisionError" in program.err
    merged = command("noisy.py", folder=tmp_path, merged=True)
    merged.expect("ZeroDivisionError")
    assert merged.finish() == 1 and merged.err == ""


def test_nothing_is_left_of_a_command_that_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(AttributeError, match="local object"):
        Command([str(HERE / "script.py")], 0.0, prepare=lambda variables: None)
    assert list(tmp_path.iterdir()) == []


def test_what_a_launcher_around_the_tests_has_set(ranks, command, tmp_path, monkeypatch):
    """Names that only begin like one of these stay."""
    for name in (
        "ROLE_ARN",
        "LOCAL_DATA",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
        "INPROCESS_RUN_DIR",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.setenv(name, "x")
    (tmp_path / "shows.py").write_text("import json, os, sys\njson.dump(dict(os.environ), sys.stdout)")
    program = command("shows.py", folder=tmp_path)
    assert program.finish() == 0
    for seen in (json.loads(program.out), ranks(2).run(programs.environment).values[0]):
        assert seen["ROLE_ARN"] == seen["LOCAL_DATA"] == "x" and seen["INPROCESS_RUN_DIR"] == "none"
        assert not {"GROUP_RANK", "TORCHELASTIC_RUN_ID"} & seen.keys() and seen.get("LOCAL_WORLD_SIZE") in (None, "2")
