"""Jobs in a real SLURM: what ends, what goes on, what starts again. `nox -s slurm` runs them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .cluster import NODES, Cluster, Job, eventually, missing
from .training import expected

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(600)]

STEPS = 60
TRAINING = Path(__file__).with_name("training.py")
#: one that writes a last checkpoint where it is asked to leave
LEAVING = Path(__file__).parents[1] / "preemption" / "training.py"
#: what one of its processes has noted
Note = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "examples"
#: one process for each rank; SLURM leaves the others alone when one ends
STEP = "srun --no-kill --kill-on-bad-exit=0 --wait=0"
SRUN = f"{STEP} python {TRAINING} $FOLDER"
#: a launcher for each node
LAUNCHER = f"{STEP} inprocess run --nproc-per-node=2 --local-addr=127.0.0.1 {TRAINING} $FOLDER"
FOUR = ("--ntasks=4", "--ntasks-per-node=2")
#: in which rank 0 waits for the next restart, before step 25
HOLD = '--at "0:25:hold true"'


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """In place of the check for all tests: slurmd and slurmctld start processes of their own at any time, and some of
    these stay zombies. What jobs leave is looked for by the variables that all processes of a job have."""
    yield
    eventually(lambda: not of_jobs(), 30, lambda: str(of_jobs()))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """With no job, and all nodes usable, before and after."""
    running.settle()
    yield running
    running.settle()


def of_jobs() -> list[psutil.Process]:
    """Processes that run and belong to a job of the cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "SLURM_JOB_ID" in process.environ():
                found.append(process)
        except psutil.Error:  # has just ended, or is a zombie
            continue
    return found


def results(job: Job, ranks: int, steps: int = STEPS) -> list[str]:
    """The tasks that came to the end; all of them with the right weight, and no variable left in the environment."""
    ends = re.findall(r"^task (\S+): (.*); left in the environment: (.*)$", job.out, re.MULTILINE)
    trained = [end for end in ends if end[1] != "None"]
    assert {end[1] for end in trained} == {f"{steps} steps, {ranks} ranks, weight {expected(steps)}"}, job.story()
    return [task for task, _, _ in ends]


def begins(job: Job) -> list[tuple[int, int, int]]:
    """(step, ranks, iteration) of each time that the function began."""
    found = re.findall(r"^begins at step (\d+) with (\d+) ranks, iteration (\d+)", job.out, re.MULTILINE)
    return [(int(step), int(ranks), int(iteration)) for step, ranks, iteration in found]


def test_a_task_raises(cluster: Cluster, tmp_path: Path) -> None:
    """Also: a second call finds the same variables, and neither of them leaves any."""
    job = cluster.submit(tmp_path, f'{SRUN} --calls 2 --at "3:25:raise"\necho srun $?', *FOUR)
    assert job.wait()["JobState"] == "COMPLETED"
    assert begins(job) == [(0, 4, 0), (20, 4, 1), (60, 4, 0)]
    assert sorted(results(job, 4)) == list("00112233")
    assert "srun 0" in job.lines and job.out.count("left in the environment: []") == 8


def test_a_task_hangs(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, f'{SRUN} --soft-timeout 10 --at "3:25:hang"\necho srun $?', *FOUR)
    assert job.wait()["JobState"] == "COMPLETED"
    assert begins(job) == [(0, 4, 0), (20, 4, 1)]
    assert sorted(results(job, 4)) == list("0123") and "srun 0" in job.lines


@pytest.mark.parametrize("victim", [0, 3])
def test_a_task_is_killed(cluster: Cluster, tmp_path: Path, victim: int) -> None:
    """The others finish; srun tells by its exit code that one did not."""
    job = cluster.submit(tmp_path, f'{SRUN} --at "{victim}:25:kill"\necho srun $?', *FOUR)
    assert job.wait()["JobState"] == "COMPLETED"
    assert begins(job) == [(0, 4, 0), (20, 3, 1)]
    assert sorted(results(job, 3)) == [task for task in "0123" if task != str(victim)]
    assert "srun 137" in job.lines


def test_a_spare_takes_the_place_of_a_killed_task(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, f'{SRUN} --active 3 --at "1:25:kill"\necho srun $?', *FOUR)
    job.wait()
    assert begins(job) == [(0, 3, 0), (20, 3, 1)]
    assert sorted(results(job, 3)) == list("023")


def test_a_worker_of_a_launcher_raises(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, f'{LAUNCHER} --at "3:25:raise"\necho srun $?', "--ntasks-per-node=1")
    assert job.wait()["JobState"] == "COMPLETED"
    assert begins(job) == [(0, 4, 0), (20, 4, 1)]
    assert sorted(results(job, 4)) == list("0011") and "srun 0" in job.lines


def test_a_worker_of_a_launcher_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, f'{LAUNCHER} --min-ranks 4 --at "3:25:kill"\necho srun $?', "--ntasks-per-node=1")
    assert job.wait()["JobState"] == "COMPLETED"
    assert begins(job)[0] == (0, 4, 0) and begins(job)[-1][:2] == (20, 4)
    assert sorted(results(job, 4)) == list("0011")
    assert "srun 0" in job.lines and "started again alone: rank 3: 1" in job.out


def test_a_drained_node_lets_the_job_finish(cluster: Cluster, tmp_path: Path) -> None:
    drain = f"scontrol update NodeName={NODES[1]} State=DRAIN Reason=test && sinfo -h -N -o 'node %N is %T'"
    job = cluster.submit(tmp_path, f'{SRUN} --at "0:25:run {drain}"', *FOUR)
    assert job.wait()["JobState"] == "COMPLETED"
    assert begins(job) == [(0, 4, 0)] and f"node {NODES[1]} is draining" in job.lines
    assert sorted(results(job, 4)) == list("0123")
    eventually(lambda: cluster.state(NODES[1]) == "drained", 30, cluster.story)


def test_a_node_is_set_to_down(cluster: Cluster, tmp_path: Path) -> None:
    """With --no-kill, for the job and for the step, its tasks end and the others go on."""
    down = f"scontrol update NodeName={NODES[1]} State=DOWN Reason=test"
    job = cluster.submit(tmp_path, f'{SRUN} --at "0:25:hold {down}"\necho srun $?', "--no-kill", *FOUR)
    facts = job.wait()
    assert begins(job)[0] == (0, 4, 0) and begins(job)[-1][:2] == (20, 2), job.story()
    assert sorted(results(job, 2)) == list("01")
    assert facts["JobState"] == "COMPLETED", job.story()


def test_a_node_is_set_to_down_without_no_kill(cluster: Cluster, tmp_path: Path) -> None:
    """The whole job is started again from its checkpoint, once SLURM has two nodes for it."""
    down = f"scontrol update NodeName={NODES[1]} State=DOWN Reason=test"
    job = cluster.submit(tmp_path, f'{SRUN} --at "0:25:hold {down}"', "--requeue", *FOUR)
    eventually(lambda: job.facts()["Restarts"] == "1", 100, job.story)
    cluster.restore()
    facts = job.wait()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.story()
    assert begins(job) == [(0, 4, 0), (20, 4, 0)] and "SLURM_RESTART_COUNT=1" in job.out
    assert sorted(results(job, 4)) == list("0123")


@pytest.mark.parametrize(
    ("step", "tasks", "places"),
    [
        (SRUN, FOUR, "01"),
        (LAUNCHER.replace("inprocess run", "inprocess run --nnodes=1:2"), ("--ntasks-per-node=1",), "00"),
    ],
    ids=["ranks", "launcher"],
)
def test_a_node_is_lost(cluster: Cluster, tmp_path: Path, step: str, tasks: tuple[str, ...], places: str) -> None:
    job = cluster.submit(tmp_path, f"{step} {HOLD}\necho srun $?", "--no-kill", *tasks)
    job.expect("rank 0 at step 25")
    cluster.lose(NODES[1])
    facts = job.wait()
    assert begins(job) == [(0, 4, 0), (20, 2, 1)], job.story()
    assert sorted(results(job, 2)) == list(places)
    assert facts["JobState"] == "COMPLETED", job.story()


def test_the_batch_host_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """With it goes the script of the job: SLURM starts all of it again. Until it notices, the others train on."""
    job = cluster.submit(tmp_path, f"{SRUN} {HOLD}", "--requeue", *FOUR)
    job.expect("rank 0 at step 25")
    cluster.lose(NODES[0])
    eventually(lambda: job.facts()["Restarts"] == "1", 100, job.story)
    cluster.restore()
    assert job.wait()["JobState"] == "COMPLETED"
    # nothing that they print arrives, as srun is gone; what they save does
    (_, (step, *how)) = begins(job)
    assert step in range(20, STEPS + 1, 10) and how == [4, 0], job.story()
    assert sorted(results(job, 4)) == list("0123")


def test_the_batch_host_is_lost_with_no_kill(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM takes the node away from the job, and counts it as running, though nothing is left of its script."""
    job = cluster.submit(tmp_path, f"{SRUN} {HOLD}", "--no-kill", "--requeue", *FOUR)
    job.expect("rank 0 at step 25")
    cluster.lose(NODES[0])
    eventually(lambda: job.facts()["NodeList"] == NODES[1], 100, job.story)
    facts = job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("RUNNING", "0"), job.story()


def test_a_requeued_job_goes_on_from_its_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    requeue = "scontrol requeue $SLURM_JOB_ID"
    job = cluster.submit(tmp_path, f"{SRUN} --at '0:25:hold {requeue}'", "--requeue", *FOUR)
    job.expect("begins at step 20")
    facts = job.wait()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert begins(job) == [(0, 4, 0), (20, 4, 0)] and "SLURM_RESTART_COUNT=1" in job.out
    assert sorted(results(job, 4)) == list("0123")


def preempted(cluster: Cluster, folder: Path) -> tuple[Job, list[Note]]:
    """A training with a LiveState that is requeued, as by a scheduler that preempts it; it goes on to its end. And what
    its processes have noted."""
    job = cluster.submit(folder, f"{STEP} python {LEAVING} $FOLDER", "--requeue", *FOUR)
    eventually(lambda: len(steps_of(folder)) == 4 and min(steps_of(folder).values()) > 20, 100, job.story)
    before = set(steps_of(folder))
    cluster.ask("scontrol", "requeue", job.number)
    eventually(lambda: len(steps_of(folder).keys() - before) == 4, 200, job.story)
    (folder / "enough").touch()
    assert job.wait()["JobState"] == "COMPLETED"
    return job, notes_of(folder)


def notes_of(folder: Path) -> list[Note]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(map(json.loads, lines), key=lambda note: float(note["at"]))


def steps_of(folder: Path) -> dict[int, int]:
    """The last step of each process that has made one."""
    return {note["pid"]: note["step"] for note in notes_of(folder) if note["what"] == "step"}


def test_no_step_is_lost_where_a_job_is_preempted(cluster: Cluster, tmp_path: Path) -> None:
    """No checkpoint is due for long; the tasks get SIGTERM, write one, and leave within KillWait."""
    job, notes = preempted(cluster, tmp_path)
    first = [note for note in notes if note["pid"] in {each["pid"] for each in notes if each["what"] == "left"}]
    assert [note["code"] for note in first if note["what"] == "left"] == [143] * 4, job.story()
    assert sum(note["what"] == "hook" for note in first) == 4
    reached = max(note["step"] for note in first if note["what"] == "step")
    entries = [note for note in notes if note["what"] == "enter"]
    assert [note["step"] for note in entries] == [0] * 4 + [entries[-1]["step"]] * 4
    assert 20 < reached - 1 <= entries[-1]["step"] <= reached, job.story()


def test_one_task_is_asked_to_leave(cluster: Cluster, tmp_path: Path) -> None:
    """The others go on in their processes, with the step after the last."""
    job = cluster.submit(tmp_path, f"{STEP} python {LEAVING} $FOLDER", *FOUR)
    eventually(lambda: len(steps_of(tmp_path)) == 4 and min(steps_of(tmp_path).values()) > 20, 100, job.story)
    leaver = max(steps_of(tmp_path))
    os.kill(leaver, signal.SIGTERM)
    eventually(lambda: sum(note["what"] == "enter" for note in notes_of(tmp_path)) == 7, 60, job.story)
    (tmp_path / "enough").touch()
    assert job.wait()["JobState"] == "FAILED"  # srun tells of the task that left, by its status
    notes = notes_of(tmp_path)
    (left,) = [note for note in notes if note["what"] == "left"]
    assert (left["pid"], left["code"]) == (leaver, 143)
    again = [note for note in notes if note["what"] == "enter" and note["iteration"] == 1]
    assert [note["world_size"] for note in again] == [3] * 3
    assert all(left["step"] <= note["step"] <= left["step"] + 1 for note in again), (left, again)


def test_a_job_is_requeued_before_its_time_is_over(cluster: Cluster, tmp_path: Path) -> None:
    """--signal=B:TERM@60: the batch script gets SIGTERM, its tasks do not."""
    body = f"""
trap 'echo "the script got SIGTERM"; scontrol requeue $SLURM_JOB_ID' TERM
{SRUN} {HOLD} &
wait
"""
    job = cluster.submit(tmp_path, body, "--requeue", "--time=30", "--signal=B:TERM@60", *FOUR)
    job.expect("rank 0 at step 25")
    hours, minutes, _ = map(int, job.facts()["RunTime"].split(":"))
    cluster.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 2}")
    eventually(lambda: job.facts()["Restarts"] == "1", 120, job.story)
    cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")  # for the second run
    facts = job.wait()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.story()
    assert begins(job) == [(0, 4, 0), (20, 4, 0)] and job.lines.count("the script got SIGTERM") == 1
    assert sorted(results(job, 4)) == list("0123")


def test_sigterm_to_srun_ends_its_tasks(cluster: Cluster, tmp_path: Path) -> None:
    """It is not passed on: srun has SLURM kill the step."""
    body = f"""
{SRUN} --at '0:25:hold kill -TERM $(cat $FOLDER/srun)' &
echo $! > $FOLDER/srun
wait $!
echo srun $?
"""
    job = cluster.submit(tmp_path, body, *FOUR)
    assert job.wait()["JobState"] == "COMPLETED"
    assert "srun: forcing job termination" in job.out and "left in the environment" not in job.out
    assert begins(job) == [(0, 4, 0)]


def test_a_cancelled_job_leaves_no_process(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, f"{SRUN} {HOLD}", *FOUR)
    job.expect("rank 0 at step 25")
    cluster.ask("scancel", job.number)
    assert job.wait()["JobState"] == "CANCELLED"
    eventually(lambda: not of_jobs(), 30, lambda: str(of_jobs()))


@pytest.mark.parametrize("doomed", [False, True])
def test_wait_daemon_as_the_last_command_of_a_task(cluster: Cluster, tmp_path: Path, doomed: bool) -> None:
    """The task lasts until its monitor has told the others how its rank ended."""
    fault = '--at \\"1:25:kill\\"' if doomed else ""
    inner = f"""python {TRAINING} $FOLDER --pidfile {fault}; code=$?
python -m inprocess.wait_daemon $FOLDER/monitor_$SLURM_PROCID.pid
exit $code"""
    job = cluster.submit(
        tmp_path, f"srun --kill-on-bad-exit=0 --wait=0 bash -c '{inner}'\necho srun $?".replace('\\"', '"'), *FOUR
    )
    assert job.wait()["JobState"] == "COMPLETED"
    assert len(results(job, 3 if doomed else 4)) == (3 if doomed else 4)
    assert len([line for line in job.lines if "the monitor" in line]) == 4
    assert f"srun {137 if doomed else 0}" in job.lines
    assert not list(tmp_path.glob("monitor_*.pid"))


@pytest.mark.parametrize("name", ["srun", "launcher", "spares", "requeue", "wait_daemon"])
def test_example(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """As it is in the repository; each trains to the end, over the fault that is in the program."""
    job = cluster.submit_file(tmp_path, EXAMPLES / "slurm" / f"{name}.sbatch", EXAMPLES=str(EXAMPLES))
    assert job.wait()["JobState"] == "COMPLETED", job.story()
    assert bool(list(tmp_path.glob("done-*"))) == (name != "launcher")
    assert "restart 1: rank 1 raised an exception: RuntimeError: a fault, once" in job.out
    assert job.out.count("the weights are right to 0.0") == 4
    assert job.out.count("was a spare") == (2 if name == "spares" else 0)


def test_an_example_whose_training_fails(cluster: Cluster, tmp_path: Path) -> None:
    """With a checkpoint, which cannot be read."""
    (tmp_path / "checkpoint.pt").write_text("this is none")
    place = str(tmp_path / "checkpoint.pt")
    job = cluster.submit_file(tmp_path, EXAMPLES / "slurm" / "srun.sbatch", EXAMPLES=str(EXAMPLES), CHECKPOINT=place)
    assert job.wait()["JobState"] == "FAILED", job.story()
