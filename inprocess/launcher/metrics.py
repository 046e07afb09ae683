"""The program that serves the metrics of the job (`--metrics`), beside the workers of the first node.

Whatever becomes of it, the job does not wait for it and does not fail for it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from inprocess.system.logs import get_logger

__all__ = ["MetricsProgram"]

log = get_logger("inprocess.run")
#: how long its end may take before it is killed, and after that (seconds)
END_S = 1.0
CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from inprocess.reports.endpoint import main
sys.exit(main(json.loads(sys.argv[2])))
"""


class MetricsProgram:
    """`inprocess metrics` for a run directory; ``listen``: ``[HOST:]PORT``, or None for no such program."""

    def __init__(self, listen: str | None) -> None:
        self._listen = listen
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, node: int, run_dir: str | None) -> None:
        """The workers of this node are about to start; ``run_dir``: where they write, None: nowhere."""
        if self._listen is None or node != 0 or self._process is not None:
            return
        if run_dir is None:
            log.warning("--metrics=%s: there is no run directory to make them from; pass --run-dir DIR", self._listen)
            return
        given = [run_dir, "--listen", self._listen, "--of-launcher"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CODE, json.dumps(sys.path), json.dumps(given)],
                stdin=subprocess.PIPE,  # its end is the launcher's, however that comes
                stdout=2,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("--metrics=%s: the program could not be started: %s", self._listen, error)

    def close(self) -> None:
        """The job is over."""
        if (process := self._process) is None:
            return
        if (code := process.poll()) is not None:
            log.warning("--metrics=%s: the program had ended during the job, exit code %d", self._listen, code)
        for end in (process.terminate, process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                break
        assert process.stdin is not None
        process.stdin.close()
