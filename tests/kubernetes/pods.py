"""Pods of a Job as processes of this machine: what Kubernetes does with containers, as far as one machine can do it.

Each container has its own process namespace, so its process 1 is the image's entry point, and where that ends,
everything else in the container is killed, the library's monitor among it, as in a pod. A container that fails is
started again, as `restartPolicy: OnFailure` does. What differs: the pods have loopback addresses and this
machine's files, the mounts are folders here, and there is no pause before a container is started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.kubernetes.reading import ROOT, Started, container_of, pod_of, started

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
#: of this process, that a container would not have
NOT_INHERITED = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|TORCHELASTIC_|INPROCESS_|PYTEST_|PET_")


def refused() -> str:
    """Why this machine cannot run the pods; empty: it can."""
    if shutil.which("dumb-init", path=_path()) is None:
        return "there is no dumb-init, the image's entry point: pip install dumb-init"
    try:
        tried = subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def _path() -> str:
    """The programs of this Python first, as those of the image are on its path."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


class Pod:
    """One pod: its container, which may be started several times, and what it has printed."""

    def __init__(self, index: int, what: Started, folder: Path) -> None:
        self.index, self.what, self.folder = index, what, folder
        self.codes, self.lines = list[int](), list[str]()
        self.process: subprocess.Popen[bytes] | None = None
        self.partial = b""

    def start(self) -> None:
        inherited = {name: text for name, text in os.environ.items() if not NOT_INHERITED.match(name)}
        environment = {**inherited, "PATH": _path(), "PYTHONPATH": str(ROOT), **self.what.environment}
        command = [*NAMESPACE, *self.what.arguments]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=environment, cwd=self.folder, start_new_session=True, **both)

    @property
    def first(self) -> psutil.Process:
        """Process 1 of the container."""
        assert self.process is not None
        (first,) = psutil.Process(self.process.pid).children()
        return first

    @property
    def program(self) -> psutil.Process:
        """What process 1 has started: the program itself. The monitor is a child of process 1 as well, later."""
        return min(self.first.children(), key=lambda child: child.pid)

    def inside(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a hook or a probe in the container."""
        environment = {**os.environ, "PATH": _path(), "PYTHONPATH": str(ROOT), **self.what.environment}
        enter = ["nsenter", "--pid", "--mount", "--target", str(self.first.pid)]
        return subprocess.run([*enter, *command], env=environment, check=False, capture_output=True, text=True)


class Cluster:
    """The pods of one Job, from their start to the end of the last one."""

    def __init__(
        self,
        job: Mapping[str, Any],
        folder: Path,
        deadline: float,
        places: Mapping[str, str],
        more: Sequence[str],
    ) -> None:
        assert pod_of(job)["restartPolicy"] == "OnFailure"  # else a container is not started again in its pod
        self._job, self._deadline = job, deadline
        self._left = int(job["spec"]["backoffLimit"])
        self._ready = selectors.DefaultSelector()
        self._leaving = set[int]()
        self.pods = []
        for index in range(job["spec"]["completions"]):
            place = folder / f"pod-{index}"
            what = started(job, index, address=f"127.0.0.{index + 1}")
            what = _placed(what, {**places, **_mounts(job, folder / "shared", place)}, more)
            self.pods.append(Pod(index, what, place))

    def start(self) -> None:
        for pod in self.pods:
            self._start(pod)

    def wait_for(self, seen: Callable[[], bool], what: str, seconds: float = math.inf) -> None:
        """Go on until this is so, or the deadline is reached; containers that fail meanwhile are started again."""
        deadline = min(self._deadline, time.monotonic() + seconds)
        while not seen():
            if not self._ready.get_map():
                raise AssertionError(f"never came: {what}")
            events = self._ready.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise AssertionError(f"not in time: {what}")
            for key, _ in events:
                self._read(key.data)

    def wait_for_line(self, index: int, pattern: str, since: int = 0) -> None:
        lines = self.pods[index].lines
        self.wait_for(lambda: any(re.search(pattern, line) for line in lines[since:]), f"{pattern!r} from pod {index}")

    def wait_for_end(self) -> list[list[int]]:
        """The exit codes of all containers of each pod."""
        self.wait_for(lambda: not self._ready.get_map(), "the end of all pods")
        return [pod.codes for pod in self.pods]

    def kill(self, index: int) -> None:
        """SIGKILL to the program, as by the kernel where memory is short; the container ends by it."""
        self.pods[index].program.kill()

    def ask_to_leave(self, *indices: int) -> None:
        """What the kubelet does with pods that are deleted: the hook, then SIGTERM. They are not started again."""
        self._leaving.update(indices)
        pods = [self.pods[index] for index in indices]
        for pod in pods:
            pod.inside(pod.what.pre_stop)
        for pod in pods:  # at once, as by the kubelets of all nodes
            pod.first.send_signal(signal.SIGTERM)

    def succeed(self) -> None:
        """What the Job controller does when the success policy is met: the pods that are left are deleted."""
        (rule,) = self._job["spec"]["successPolicy"]["rules"]
        done = [pod for pod in self.pods if pod.codes[-1:] == [0]]
        assert len(done) >= rule["succeededCount"], self.story()
        self.ask_to_leave(*(pod.index for pod in self.pods if pod.process is not None))
        self.wait_for_end()

    def create_again(self, index: int) -> None:
        """What the Job controller does when a pod is gone."""
        self._leaving.discard(index)
        self._start(self.pods[index])

    def story(self) -> str:
        parts = []
        for pod in self.pods:
            parts += [f"--- pod {pod.index}, exit codes {pod.codes}", *pod.lines]
        return "\n".join(parts)

    def close(self) -> None:
        for pod in self.pods:
            if pod.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    pod.process.kill()  # and by --kill-child process 1, and with it all others of the container
                pod.process.communicate()
        self._ready.close()

    def _start(self, pod: Pod) -> None:
        pod.start()
        assert pod.process is not None and pod.process.stdout is not None
        self._ready.register(pod.process.stdout, selectors.EVENT_READ, pod)

    def _read(self, pod: Pod) -> None:
        """What has come. At the end of it nothing of the container is left."""
        assert pod.process is not None and pod.process.stdout is not None
        piece = os.read(pod.process.stdout.fileno(), 65536)
        *whole, pod.partial = (pod.partial + piece).split(b"\n")
        pod.lines += [line.decode(errors="replace") for line in whole]
        if piece:
            return
        self._ready.unregister(pod.process.stdout)
        pod.process.stdout.close()
        pod.codes.append(pod.process.wait(max(0.0, self._deadline - time.monotonic())))
        pod.process = None
        if pod.codes[-1] and pod.index not in self._leaving and self._left > 0:
            self._left -= 1
            self._start(pod)


def _mounts(job: Mapping[str, Any], shared: Path, own: Path) -> dict[str, str]:
    """Where the volumes of a pod are: a claim's is the same for all, others are the pod's own."""
    claims = {volume["name"] for volume in pod_of(job)["volumes"] if "persistentVolumeClaim" in volume}
    folders = {}
    for mount in container_of(job)["volumeMounts"]:
        folder = (shared if mount["name"] in claims else own) / mount["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if not mount["mountPath"].startswith("/dev/"):  # shared memory is this machine's
            folders[mount["mountPath"]] = str(folder)
    return folders


def _placed(what: Started, places: Mapping[str, str], more: Sequence[str]) -> Started:
    """The same with what differs on this machine: addresses, ports, and where the image's files and the mounts are."""
    names = re.compile("|".join(map(re.escape, sorted(places, key=len, reverse=True))))

    def place(text: str) -> str:
        return names.sub(lambda found: places[found[0]], text)

    environment = {name: place(text) for name, text in what.environment.items()}
    return dataclasses.replace(what, arguments=[*map(place, what.arguments), *more], environment=environment)


@contextlib.contextmanager
def cluster(
    job: Mapping[str, Any], folder: Path, seconds: float, places: Mapping[str, str], more: Sequence[str] = ()
) -> Iterator[Cluster]:
    """The pods of a Job; they are gone at the end.

    ``places`` says what stands for what on this machine, ``more`` are arguments of the test's own.
    """
    running = Cluster(job, folder, time.monotonic() + seconds, {"/app": str(ROOT), **places}, more)
    try:
        running.start()
        yield running
    except BaseException:
        print(running.story())  # pytest shows it
        raise
    finally:
        running.close()
