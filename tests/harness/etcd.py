"""A real etcd cluster on loopback ports for the tests of `EtcdStore`. It needs the program `etcd`, see `MISSING`."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from inprocess.testing.ports import ReservedPort

from .needs import is_needed

ETCD = shutil.which("etcd")
MISSING = "no program etcd on PATH; on Debian and Ubuntu: apt-get install etcd-server"
if ETCD is None and is_needed("etcd"):
    raise RuntimeError(f"INPROCESS_TESTS_NEED=etcd: {MISSING}")
#: longest wait for a cluster to be ready (seconds)
READY = 30.0


class EtcdCluster:
    """Members 0..n-1, ready when this returns. Ports are reserved, so a member can be started again on its own."""

    def __init__(self, folder: Path, members: int = 1, options: Sequence[str] = (), scheme: str = "http") -> None:
        assert ETCD is not None, MISSING
        self._folder, self._options, self._scheme = folder, options, scheme
        self._client = [ReservedPort() for _ in range(members)]
        self._peer = [ReservedPort() for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ready: dict[int, socket.socket] = {}
        try:
            self.start_all()
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        return [f"{self._scheme}://127.0.0.1:{port.number}" for port in self._client]

    def start_all(self) -> None:
        """Start all members, none of which runs. One alone would not be ready before a majority is there."""
        for member in range(len(self._client)):
            self._spawn(member)
        for member in range(len(self._client)):
            self._await_ready(member)

    def start(self, member: int) -> None:
        """Start a member again, with the data it has."""
        self._spawn(member)
        self._await_ready(member)

    def kill(self, member: int = 0) -> None:
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for member in list(self._processes):
            self.kill(member)

    def turn_away(self, times: int) -> None:
        """In place of the members, none of which runs, accept connections and close them, until so many have come."""
        deadline = time.monotonic() + READY
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for port in self._client:
                door = stack.enter_context(socket.socket())
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                door.bind(("127.0.0.1", port.number))
                door.listen(64)
                selector.register(door, selectors.EVENT_READ)
            while times > 0:
                left = deadline - time.monotonic()
                assert left > 0, f"{times} connections have not come"
                for key, _ in selector.select(left):
                    key.fileobj.accept()[0].close()  # type: ignore[union-attr]
                    times -= 1

    def signal(self, signum: signal.Signals, member: int = 0) -> None:
        self._processes[member].send_signal(signum)
        if signum == signal.SIGSTOP:  # a thread of it may answer once more meanwhile
            os.waitid(os.P_PID, self._processes[member].pid, os.WSTOPPED)

    def close(self) -> None:
        self.kill_all()
        for port in (*self._client, *self._peer):
            port.close()
        for ready in self._ready.values():
            ready.close()
        self._ready.clear()

    def story(self) -> str:
        """The end of each member's log."""
        logs = sorted(self._folder.glob("etcd*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)

    def _spawn(self, member: int) -> None:
        name, client, peer = f"etcd{member}", self._client[member].number, self._peer[member].number
        cluster = ",".join(f"etcd{n}=http://127.0.0.1:{port.number}" for n, port in enumerate(self._peer))
        words = {
            "name": name,
            "data-dir": str(self._folder / name),
            "listen-client-urls": f"{self._scheme}://127.0.0.1:{client}",
            "advertise-client-urls": f"{self._scheme}://127.0.0.1:{client}",
            "listen-peer-urls": f"http://127.0.0.1:{peer}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
            "initial-cluster": cluster,
            # milliseconds; half of the defaults, so that the loss of a leader takes half as long
            "heartbeat-interval": "50",
            "election-timeout": "500",
        }
        where = self._folder / f"{name}.ready"
        where.unlink(missing_ok=True)
        self._ready[member] = ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ready.bind(str(where))
        environment = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(where)}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [str(ETCD), *(f"--{word}={value}" for word, value in words.items()), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def _await_ready(self, member: int) -> None:
        """etcd tells the one who started it, as it would tell systemd."""
        ready, end = self._ready.pop(member), time.monotonic() + READY
        with ready:
            while True:
                ready.settimeout(max(0.01, end - time.monotonic()))
                try:
                    if b"READY=1" in ready.recv(1 << 12):
                        return
                except TimeoutError:
                    raise AssertionError(f"etcd is not ready after {READY:g} s\n{self.story()}") from None
