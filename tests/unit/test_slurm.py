"""What is derived from SLURM's variables, for ranks and for launchers."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess.exception import OptionError
from inprocess.launcher import arguments
from inprocess.system import environment, slurm

#: of task 3 of `srun --nodes 2 --ntasks 4`, as SLURM 22.05 sets them
STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[1-3]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
RANKS = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "gpu2",
    "MASTER_PORT": "24567",
    "INPROCESS_JOB": "slurm-1234567-0",
}


def test_all_of_them() -> None:
    assert slurm.variables(STEP) == RANKS


@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500"), ("RANK", "0")])
def test_what_is_set_stays(name: str, value: str) -> None:
    assert slurm.variables(STEP | {name: value}) == {key: text for key, text in RANKS.items() if key != name}
    assert slurm.variables(STEP | {name: " "}) == RANKS


def test_older_names() -> None:
    names = {
        "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS",
        "SLURM_STEP_NODELIST": "SLURM_JOB_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE": "SLURM_TASKS_PER_NODE",
    }
    assert slurm.variables({names.get(name, name): value for name, value in STEP.items()}) == RANKS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", "node1"),
        ("a,b", "a b"),
        ("a[1-3,07],b", "a1 a2 a3 a07 b"),
        ("gpu[007-010]", "gpu007 gpu008 gpu009 gpu010"),
        ("gpu[9-10]", "gpu9 gpu10"),
        ("0x7f[000001-000002]", "0x7f000001 0x7f000002"),
        ("rack[1-2]node[1,3]", "rack1node1 rack1node3 rack2node1 rack2node3"),
        ("c[1-2]-ib.example.org", "c1-ib.example.org c2-ib.example.org"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
        (" a[1] ", "a1"),
    ],
)
def test_hosts(text: str, expected: str) -> None:
    assert list(slurm.hosts(text)) == expected.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "a[", "a]", "a[]", "a[1", "a[3-1]", "a[1-]", "a[x]", "a[1,,2]", "a b", "a[1-9999999]", "a[[1]]"],
)
def test_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(slurm.hosts(text))


def test_the_first_host_of_a_long_list_is_found_at_once() -> None:
    assert next(slurm.hosts("a[1-900]b[1-900]c[1-900]")) == "a1b1c1"
    with pytest.raises(ValueError, match="more than 1000000 hosts"):
        list(slurm.hosts("a[1-900]b[1-900]c[1-900]"))


@pytest.mark.parametrize(
    ("text", "expected"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4]), (" 8(x1) ", [8])]
)
def test_tasks_per_node(text: str, expected: list[int]) -> None:
    assert slurm.tasks_per_node(text) == expected


@pytest.mark.parametrize("text", ["", "2,", "x", "2(x)", "2(3)", "-1", "2(x3", "1(x99999999)"])
def test_no_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match=r"number of tasks|too many nodes"):
        slurm.tasks_per_node(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_PROCID": ""}, r"SLURM_PROCID is not set\. Start the program with srun"),
        ({"SLURM_PROCID": "x"}, r"SLURM_PROCID='x' is no number from 0 on\. Start the program with srun"),
        ({"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": ""}, "SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set"),
        ({"SLURM_STEP_ID": ""}, "SLURM_STEP_ID is not set, so srun did not start .* wait for 3 others"),
        ({"SLURM_STEP_NODELIST": "a[1-"}, r"SLURM_STEP_NODELIST='a\[1-' is no list of hosts: .* Set MASTER_ADDR"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE='2\(x': .* Set LOCAL_WORLD_SIZE"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2, and SLURM_STEP_TASKS_PER_NODE='3,1' has 2 nodes"),
    ],
)
def test_an_error_names_the_variable_its_value_and_the_remedy(change: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        slurm.variables(STEP | change)


def test_a_single_task_needs_no_srun() -> None:
    alone = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "", "SLURM_STEP_ID": "", "SLURM_PROCID": "0"}
    assert slurm.variables(STEP | alone | {"SLURM_NODEID": "0"})["WORLD_SIZE"] == "1"


def test_steps_and_jobs_that_may_run_together_have_ports_of_their_own() -> None:
    def at(job: int, step: int) -> int:
        return slurm.port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})

    ports = [at(job, step) for job, step in itertools.product(range(9_950, 10_050), range(10))]
    assert len(set(ports)) == len(ports) and min(ports) >= 20000 and max(ports) < 30000
    assert slurm.port({"SLURM_JOB_ID": "7"}) == at(7, 0) == 20007


def test_only_where_it_is_asked_for() -> None:
    assert environment.derived(STEP) == {}
    assert environment.derived(STEP | {"INPROCESS_LAUNCH": " "}) == {}
    assert environment.derived(STEP | {"INPROCESS_LAUNCH": "slurm"}) == RANKS
    assert environment.derived(STEP | {"INPROCESS_LAUNCH": "slurm", "RANK": "1", "WORLD_SIZE": "2"}) == {}


def test_an_unknown_launcher() -> None:
    with pytest.raises(OptionError, match="INPROCESS_LAUNCH='slrum': it can be 'slurm'"):
        environment.derived({"INPROCESS_LAUNCH": "slrum"})


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This process is a task of a step; what a launcher around the tests has set is gone."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "PET_", "GROUP_RANK")) or name in RANKS:
            monkeypatch.delenv(name)

    def change(**changes: str) -> None:
        for name, value in (STEP | {"INPROCESS_LAUNCH": "slurm"} | changes).items():
            monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_after_a_call(step: Callable[..., None], fails: bool) -> None:
    step(MASTER_ADDR="10.0.0.1")
    before = dict(os.environ)
    try:
        with environment.translated():
            assert {name: os.environ[name] for name in RANKS} == RANKS | {"MASTER_ADDR": "10.0.0.1"}
            os.environ["LOCAL_RANK"] = "7"
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert dict(os.environ) == before


ONE_EACH = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}


def test_launchers_meet_at_the_first_node(step: Callable[..., None]) -> None:
    step(**ONE_EACH, SLURM_RESTART_COUNT="2")
    given = arguments.parse(["train.py"])
    assert (given.nnodes, given.rdzv_backend, given.rdzv_endpoint) == ("2", "c10d", "gpu2:24567")
    assert (given.rdzv_id, given.rdzv_conf, given.preferred_rank) == ("slurm-1234567-0-2", "is_host=False", 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nnodes=1:2"], {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_endpoint": "gpu2:24567"}),
        (["--rdzv-id=mine"], {"nnodes": "2", "rdzv_id": "mine", "rdzv_endpoint": "gpu2:24567"}),
        (["--rdzv-conf=timeout=9"], {"rdzv_conf": "timeout=9,is_host=False"}),
        (["--rdzv-conf=is_host=1"], {"rdzv_conf": "is_host=1"}),
        (["--master-addr=h", "--master-port=1"], {"nnodes": "2", "rdzv_backend": "static", "rdzv_conf": ""}),
        (["--rdzv-endpoint=h:1", "--rdzv-backend=c10d"], {"rdzv_endpoint": "h:1", "rdzv_id": "none"}),
        (["--nnodes=1"], {"nnodes": "1", "rdzv_backend": "static", "rdzv_endpoint": ""}),
        (["--standalone"], {"nnodes": "1:1", "rdzv_endpoint": "", "rdzv_id": "none"}),
    ],
)
def test_an_option_that_is_given_wins(step: Callable[..., None], options: list[str], expected: dict[str, str]) -> None:
    step(**ONE_EACH)
    given = vars(arguments.parse([*options, "train.py"]))
    assert {name: given[name] for name in expected} == expected


def test_without_the_variable_torchs_defaults_stay(step: Callable[..., None]) -> None:
    step(INPROCESS_LAUNCH="")
    given = arguments.parse(["train.py"])
    assert (given.nnodes, given.rdzv_backend, given.rdzv_endpoint, given.rdzv_id) == ("1:1", "static", "", "none")
    assert (given.master_addr, given.rdzv_conf) == ("127.0.0.1", "")


def test_a_node_has_one_launcher(step: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    step()
    with pytest.raises(SystemExit):
        arguments.parse(["train.py"])
    said = capsys.readouterr().err
    assert "4 tasks on 2 nodes" in said and "srun --ntasks-per-node=1" in said


# --- the scripts of the examples

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
#: in place of SLURM's: (what its tasks leave, its code) -> whether the job has succeeded
RUNS = {
    "all is well": (("checkpoint", "done"), 0, True),
    "a task was killed, the others have finished": (("checkpoint", "done"), 137, True),
    "all have failed, after a checkpoint": (("checkpoint",), 1, False),
    "a task was killed, then the others have failed": (("checkpoint",), 137, False),
}


@pytest.mark.parametrize("name", ["srun", "spares", "requeue", "wait_daemon"])
@pytest.mark.parametrize("run", RUNS)
def test_a_job_succeeds_where_its_training_is_done(name: str, run: str, tmp_path: Path) -> None:
    left, code, succeeds = RUNS[run]
    fake = tmp_path / "srun"
    fake.write_text("#!/bin/sh\n" + "".join(f'echo x > "{each}-7{suffix(each)}"\n' for each in left) + f"exit {code}\n")
    fake.chmod(0o700)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for variable in ("CHECKPOINT", "DONE", "PIDFILES"):
        env.pop(variable, None)
    ended = subprocess.run(["bash", EXAMPLES / f"{name}.sbatch"], cwd=tmp_path, env=env, check=False)
    assert (ended.returncode == 0) == succeeds


def suffix(name: str) -> str:
    return ".pt" if name == "checkpoint" else ""
