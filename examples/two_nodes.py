"""Two nodes train together; one of them is lost whole, comes back, and takes its ranks again.

    python examples/two_nodes.py
    python examples/two_nodes.py --victim 0

A node is a launcher, `inprocess run`, with two workers and their monitors; here both are on one machine. The node that
is lost is killed with all its processes, as when the power fails, and its launcher is started again. With node 1 the
workers of the other node go on in their processes. Node 0 has the workers' store: without it all workers start anew,
from the last checkpoint, once that launcher is back. With an etcd, either node may be lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from digits_ddp import QUIET, reserved_port

SCRIPT = Path(__file__).with_name("digits_ddp.py")


class Node:
    """A launcher and everything below it; shows what they print."""

    def __init__(self, number: int, command: list[str], directory: str) -> None:
        self.number, self.command = number, command
        # a launcher that is killed leaves its temporary files there
        self.variables = {**QUIET, "TMPDIR": directory}
        self.lines: list[str] = []
        #: protects the lines
        self.changed = threading.Condition()
        self.start()

    def start(self) -> None:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.launcher = subprocess.Popen(self.command, env={**os.environ, **self.variables}, **output)
        self.reader = threading.Thread(target=self.read, args=(self.launcher,), daemon=True)
        self.reader.start()

    def read(self, launcher: subprocess.Popen) -> None:
        for line in launcher.stdout:
            print(f"node {self.number}  {line}", end="", flush=True)
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()

    def wait_for(self, pattern: str, seconds: float = 120, since: int = 0) -> None:
        """Until it prints a line with that; ``since``: a line with this number, or a later one."""
        with self.changed:
            if not self.changed.wait_for(lambda: any(re.search(pattern, line) for line in self.lines[since:]), seconds):
                raise SystemExit(f"node {self.number} did not print {pattern!r} within {seconds} s")

    def wait(self) -> int:
        """Until it has ended, and all that it printed is shown; its exit code."""
        self.reader.join()
        return self.launcher.wait()

    def lose(self) -> None:
        """Kill the launcher, its workers, and their monitors."""
        below = psutil.Process(self.launcher.pid).children(recursive=True)
        for process in (self.launcher, *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait()


@contextlib.contextmanager
def two_nodes(directory: str, port: int, args: argparse.Namespace) -> Iterator[list[Node]]:
    launcher = [sys.executable, "-m", "inprocess.run", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "two-nodes", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    training = [str(SCRIPT), "--checkpoint-dir", directory, "--steps", str(args.steps)]
    training += ["--etcd", args.etcd] if args.etcd else []
    nodes = [
        Node(
            number, [*launcher, *meeting, "--node-rank", str(number), "--local-addr", "127.0.0.1", *training], directory
        )
        for number in range(2)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.launcher.poll() is None:
                node.lose()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", type=int, choices=(0, 1), default=1, help="the node that is lost (default 1)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--etcd", metavar="URL", help="the ranks agree through this etcd, not through node 0")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    with (
        tempfile.TemporaryDirectory(prefix="two-nodes-") as directory,
        reserved_port() as port,
        two_nodes(directory, port, args) as nodes,
    ):
        first = nodes[0]
        first.wait_for(r"step +40/")
        print(f"node {args.victim} is lost", flush=True)
        nodes[args.victim].lose()
        nodes[args.victim].start()
        codes = [node.wait() for node in nodes]
    print(f"exit codes of the launchers: {codes}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
