"""The pods of the manifests, as processes of this machine, with the commands and variables that Kubernetes would give.

They train to the end: undisturbed, after the death of a process or a container, and after a pod was asked to leave.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from digits_ddp import reserved_port

from tests.kubernetes.pods import Cluster, cluster, refused
from tests.kubernetes.reading import container_of, manifest, the_job

REFUSED = refused()
pytestmark = [pytest.mark.skipif(bool(REFUSED), reason=f"no pods on this machine: {REFUSED}"), pytest.mark.timeout(300)]
SECONDS = 280
#: a training that is not over before something has happened to it
LONG = {"--steps=300": "--steps=1500"}
#: one that only ends when its pods do
ENDLESS = {"--steps=300": "--steps=1000000"}
#: so that the training cannot end before a pod that was started again is ready to join
TOGETHER = ["--min-ranks=4"]

Start = Callable[..., AbstractContextManager[Cluster]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the pods of a manifest: ``with start("job.yaml") as pods``."""
    with reserved_port() as port:

        def of(
            name: str, steps: Mapping[str, str] | None = None, more: Sequence[str] = ()
        ) -> AbstractContextManager[Cluster]:
            places = {**(steps or {}), **address_of(name, port)}
            return cluster(the_job(manifest(name)), tmp_path, SECONDS, places, more)

        yield of


def address_of(name: str, port: int) -> dict[str, str]:
    """The pod of index 0, and its port, are here."""
    (named,) = container_of(the_job(manifest(name)))["ports"]
    hosts = {"job.yaml": "train-0.train", "job-launcher.yaml": "train-nodes-0.train-nodes"}
    host = hosts.get(name, "train-set-ranks-0-0.train-set")
    return {host: "127.0.0.1", str(named["containerPort"]): str(port)}


def accuracies(pods: Cluster) -> list[float]:
    lines = [line for pod in pods.pods for line in pod.lines]
    return [float(found[1]) for line in lines if (found := re.match(r"accuracy on held-out images: (\S+)", line))]


def ranks_per_line(pods: Cluster) -> list[int]:
    """How many ranks there were, in each line of progress of whoever was rank 0."""
    lines = [line for pod in pods.pods for line in pod.lines]
    return [int(found[1]) for line in lines if (found := re.search(r"^step .* (\d) ranks ", line))]


# --- one process per pod ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_to_the_end(start: Start, name: str) -> None:
    with start(name) as pods:
        assert pods.wait_for_end() == [[0]] * 4
    assert set(ranks_per_line(pods)) == {4}
    (accuracy,) = accuracies(pods)
    assert accuracy >= 0.95


def test_a_process_is_killed_and_started_again(start: Start) -> None:
    """It joins the others, which stay in their containers."""
    with start("job.yaml", steps=LONG, more=TOGETHER) as pods:
        pods.wait_for_line(0, r"^step +20/")
        pods.kill(1)
        assert pods.wait_for_end() == [[0], [137, 0], [0], [0]]
    assert ranks_per_line(pods)[-1] == 4
    assert max(accuracies(pods)) >= 0.95


def test_the_container_with_the_store_is_killed(start: Start) -> None:
    """The others go on without index 0, which finds nobody; the Job has succeeded all the same."""
    with start("job.yaml", steps=LONG) as pods:
        pods.wait_for_line(0, r"^step +20/")
        pods.kill(0)
        pods.wait_for(lambda: all(pod.codes == [0] for pod in pods.pods[1:]), "the end of the others")
        assert accuracies(pods)[0] >= 0.95
        assert pods.pods[0].process is not None  # started again, and it waits
        pods.succeed()
    assert ranks_per_line(pods)[-1] == 3


def test_a_pod_is_asked_to_leave_and_created_again(start: Start) -> None:
    """It ends in time, with 143, and its log says what the ranks did; the pod that replaces it joins the others."""
    with start("job.yaml", steps=ENDLESS) as pods:
        pods.wait_for_line(0, r"^step +20/")
        leaving = pods.pods[1]
        pods.wait_for(lambda: leaving.inside(leaving.what.ready).returncode == 0, "ready")
        pods.ask_to_leave(1)
        pods.wait_for(lambda: leaving.process is None, "the end of the pod", seconds=leaving.what.grace)
        assert leaving.codes == [143]
        assert any(re.match(r"4 of 4 ranks running", line) for line in leaving.lines)
        pods.wait_for_line(0, r"^step .* 3 ranks ")
        pods.create_again(1)
        pods.wait_for_line(0, r"^step .* 4 ranks ", since=len(pods.pods[0].lines))
        pods.ask_to_leave(0, 1, 2, 3)
        assert pods.wait_for_end() == [[143], [143, 143], [143], [143]]


def test_all_are_asked_to_leave(start: Start, tmp_path: Path) -> None:
    """The Job is deleted: all pods end within their grace period, and a checkpoint is there for the next one."""
    with start("job.yaml", steps=ENDLESS) as pods:
        pods.wait_for_line(0, r"^step +40/")
        pods.ask_to_leave(0, 1, 2, 3)
        pods.wait_for(lambda: all(pod.process is None for pod in pods.pods), "the end", seconds=pods.pods[0].what.grace)
        assert [pod.codes for pod in pods.pods] == [[143]] * 4
    assert (tmp_path / "shared/checkpoints/digits.pt").exists()


# --- a launcher per pod -----------------------------------------------------------------------------------------------


def worker(pods: Cluster, rank: int) -> psutil.Process:
    """The training process with this rank, below the launcher of its pod."""
    for pod in pods.pods:
        for process in pod.program.children():
            if process.environ().get("RANK") == str(rank) and any("digits_ddp" in word for word in process.cmdline()):
                return process
    raise AssertionError(f"no process has rank {rank}")


def restarts_of_all(pods: Cluster) -> set[int]:
    """How often all training processes were started again, by what the launchers say at their end."""
    lines = [line for pod in pods.pods for line in pod.lines]
    return {int(found[1]) for line in lines if (found := re.search(r"restarts of all workers: (\d+)", line))}


def test_launchers_to_the_end(start: Start) -> None:
    with start("job-launcher.yaml") as pods:
        assert pods.wait_for_end() == [[0], [0]]
    assert set(ranks_per_line(pods)) == {4}
    assert max(accuracies(pods)) >= 0.95


@pytest.mark.parametrize("rank", [0, 3])
def test_a_process_is_killed_and_its_launcher_starts_another(start: Start, rank: int) -> None:
    """No container ends by it, also where it is rank 0."""
    with start("job-launcher.yaml", steps=LONG) as pods:
        pods.wait_for_line(0, r"^step +20/")
        worker(pods, rank).kill()
        assert pods.wait_for_end() == [[0], [0]]
    assert ranks_per_line(pods)[-1] == 4
    assert max(accuracies(pods)) >= 0.95


@pytest.mark.parametrize("index", [0, 1])
def test_a_container_with_a_launcher_is_killed(start: Start, index: int) -> None:
    """It is started again, and its ranks join the others; or, where it has the store, all start again."""
    with start("job-launcher.yaml", steps=LONG) as pods:
        pods.wait_for_line(0, r"^step +20/")
        pods.kill(index)
        codes = pods.wait_for_end()
    assert codes[index] == [137, 0]
    assert codes[1 - index][-1] == 0
    assert any("joins a running job" in line for pod in pods.pods for line in pod.lines) == (index == 1)
    assert max(restarts_of_all(pods)) == (0 if index == 1 else 1)
    assert ranks_per_line(pods)[-1] == 4
    assert max(accuracies(pods)) >= 0.95


def test_a_pod_with_a_launcher_is_asked_to_leave(start: Start) -> None:
    """Its workers end in time, and those of the new pod join the others, though all nodes are needed."""
    with start("job-launcher.yaml", steps=LONG) as pods:
        pods.wait_for_line(0, r"^step +20/")
        leaving = pods.pods[1]
        pods.ask_to_leave(1)
        pods.wait_for(lambda: leaving.process is None, "the end of the pod", seconds=leaving.what.grace)
        assert leaving.codes == [143]  # a launcher's, after a signal
        pods.create_again(1)
        assert pods.wait_for_end() == [[0], [143, 0]]
    assert ranks_per_line(pods)[-1] == 4
    assert restarts_of_all(pods) == {0}
