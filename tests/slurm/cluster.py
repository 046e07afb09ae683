"""A SLURM cluster of two nodes on this machine: munged, slurmctld, and two slurmd, as root, in a folder of their own.

Nothing of an installed configuration is read, and nothing listens on other interfaces than loopback. The nodes are
called 0x7f000001 and 0x7f000002: for SLURM that is a name, and for everybody who looks it up 127.0.0.1 and 127.0.0.2,
so MASTER_ADDR, which is the name of a node, leads somewhere without a line in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from inprocess.testing.ports import ReservedPort
from tests.harness.needs import is_needed

ROOT = Path(__file__).parents[2]
NODES = ("0x7f000001", "0x7f000002")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
#: until the daemons answer, and until a node is usable again (seconds)
READY = 60.0
#: SLURM tells nobody how a job or a node is: between two questions (seconds)
POLL = 0.2
#: ids of those that run, or whose end is not known yet
DAEMONS: set[int] = set()
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it starts again: 120 s by default
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
TaskPlugin=task/none
# without cgroups: processes are found by their parents
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# the nodes claim more CPUs than this machine may have
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
JobRequeue=1
ReturnToService=1
# a node that is silent for so long is down: 300 s by default
SlurmdTimeout=10
KillWait=3
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=main Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    why = f"no program {', '.join(absent)} on PATH; on Debian and Ubuntu: apt-get install slurm-wlm" if absent else ""
    if not why and os.getuid() != 0:
        why = "slurmd starts the tasks of jobs as root only"
    if why and is_needed("slurm"):
        raise RuntimeError(f"INPROCESS_TESTS_NEED=slurm: {why}")
    return why


def eventually(done: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not done():
        reap()
        assert time.monotonic() < end, f"not within {seconds:g} s: {what()}"
        pause.wait(POLL)


def reap() -> None:
    """Orphans of the daemons come to this process, which is to take note of their ends."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE and process.pid not in DAEMONS:
                os.waitpid(process.pid, os.WNOHANG)


class Cluster:
    """The daemons; ready when this returns. `close` ends them, by their ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = [ReservedPort() for _ in range(3)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "INPROCESS_"))},
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"], "/usr/sbin", "/sbin"]),
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "INPROCESS_RUN_DIR": "none",
        }
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        ports = [port.number for port in self._ports]
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, ports=ports, nodes=NODES))
        (self.folder / "state").mkdir()
        munge = self.folder / "munge"
        munge.mkdir(mode=0o711)
        with open(os.open(munge / "key", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as key:
            key.write(secrets.token_bytes(128))
        files = {name: munge / name for name in ("socket", "key-file", "pid-file", "seed-file", "log-file")}
        files["key-file"] = munge / "key"
        # --force: the folders above its socket may be writable for others, as /tmp is
        self._run("munged", "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        eventually(files["socket"].exists, READY, self.story)
        self._run("slurmctld", "slurmctld", "-D", "-f", self.folder / "slurm.conf")
        for node in NODES:
            self.start(node)
        self.settle()

    def start(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._run(node, "slurmd", "-D", "-f", self.folder / "slurm.conf", "-N", node)

    def _run(self, name: str, *command: object) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*map(str, command)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment
            )
        DAEMONS.add(self._daemons[name].pid)

    def ask(self, *command: object, check: bool = True) -> str:
        """What one of SLURM's commands prints."""
        words = [*map(str, command)]
        answer = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=READY, check=False)
        assert answer.returncode == 0 or not check, f"{words}: {answer.stderr}\n{self.story()}"
        return answer.stdout

    def state(self, node: str) -> str:
        return self.ask("sinfo", "-h", "-N", "-n", node, "-o", "%T", check=False).strip()

    def settle(self) -> None:
        """No job, and both nodes usable, whatever a test did with them.

        They need not be called idle: where two changes fall into one second, sinfo may say "mixed" for a minute.
        """
        self.ask("scancel", "--user=root", check=False)
        eventually(lambda: self.ask("squeue", "-h", check=False).strip() == "", READY, self.story)
        self.restore()

    def restore(self) -> None:
        """Both nodes can take jobs."""
        for node in NODES:
            if self._daemons[node].poll() is not None:
                self.start(node)
        eventually(lambda: all(map(self._is_usable, NODES)), READY, self.story)

    def _is_usable(self, node: str) -> bool:
        """By the reason why it is not: a node that is down may be called "mixed" for a while after its last job."""
        state, _, reason = self.ask("sinfo", "-hN", "-n", node, "-o", "%T %E", check=False).strip().partition(" ")
        if reason not in ("", "none"):
            self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            return False
        return state in ("idle", "allocated", "mixed")

    def lose(self, node: str) -> None:
        """Everything of this node is gone at once, as if its power were: slurmd, the steps, the tasks, the monitors."""
        victims = {self._daemons[node].pid: psutil.Process(self._daemons[node].pid)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    steps = [each for each in process.parents() if each.name().startswith("slurmstepd")]
                    victims.update((each.pid, each) for each in (process, *steps))
        for process in victims.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()  # none sees another one die
        for process in victims.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._daemons[node].wait()

    def submit(self, folder: Path, body: str, *options: str, **variables: str) -> Job:
        """A batch job on both nodes; `body` is its script, in which $FOLDER is its folder."""
        script = folder / "job.sbatch"
        script.write_text(f"#!/bin/bash\n{body}\n")
        return self.submit_file(folder, script, *options, **variables)

    def submit_file(self, folder: Path, script: Path, *options: str, **variables: str) -> Job:
        out = folder / "out"
        environment = {**self.environment, "INPROCESS_LAUNCH": "slurm", "FOLDER": str(folder), **variables}
        command = ["sbatch", "--parsable", f"--output={out}", "--open-mode=append", f"--chdir={folder}", "--nodes=2"]
        answer = subprocess.run(
            [*command, *options, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=READY,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        return Job(self, int(answer.stdout), out)

    def story(self) -> str:
        """How the nodes are, and the end of each log."""
        states = {node: self.state(node) for node in NODES}
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        ends = [f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs]
        return "\n".join([str(states), *ends])

    def close(self) -> None:
        if "slurmctld" in self._daemons:
            self.ask("scancel", "--user=root", check=False)
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self.ask("squeue", "-h", check=False).strip(), READY, self.story)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for port in self._ports:
            port.close()


class Job:
    """A batch job that was submitted."""

    def __init__(self, cluster: Cluster, number: int, path: Path) -> None:
        self._cluster, self.number, self._path = cluster, number, path

    @property
    def out(self) -> str:
        """What its script and its tasks have printed so far."""
        return self._path.read_text() if self._path.exists() else ""

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def facts(self) -> Mapping[str, str]:
        """What `scontrol show job` says: JobState, Restarts, NodeList, ExitCode ..."""
        words = self._cluster.ask("scontrol", "-o", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, seconds: float = 150.0, states: Sequence[str] = OVER) -> Mapping[str, str]:
        """Until it is over, or in one of these states; its facts."""
        eventually(lambda: self.facts()["JobState"] in states, seconds, self.story)
        return self.facts()

    def expect(self, text: str, seconds: float = 100.0) -> None:
        """Until it has printed this."""
        eventually(lambda: text in self.out, seconds, self.story)

    def story(self) -> str:
        return f"{self.facts()}\n{self.out}\n{self._cluster.story()}"
