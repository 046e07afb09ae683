"""The suite on this Python, and the row of it for docs/versions.md: ``python -m tests.versions [arguments of pytest]``.

Without torch, only what needs none: options, protocol, simulator, rank assignment, interrupt, watchdog. Nothing is
skipped in silence: what is left out is listed here, and a file that needs torch and is not listed fails.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: where torch is absent: folders that are run
FOLDERS = ("tests/unit", "tests/sim", "tests/threads")
#: and what in them needs torch
NEED_TORCH = (
    "tests/threads/test_abort.py",
    "tests/threads/test_abort_gloo.py",
    "tests/threads/test_bind.py",
    "tests/threads/test_checkpoints.py",
    "tests/threads/test_coalescing.py",
    "tests/threads/test_elastic_sampler.py",
    "tests/threads/test_leftovers.py",
    "tests/threads/test_live_http.py",
    "tests/threads/test_live_state.py",
    "tests/threads/test_monitor_process.py",
    "tests/threads/test_monitor_thread.py",
    "tests/threads/test_nccl.py",
    "tests/threads/test_nccl_bootstrap.py",
    "tests/threads/test_nccl_shutdown.py",
    "tests/threads/test_nccl_wake.py",
    "tests/threads/test_parked.py",
    "tests/threads/test_stuck_disk.py",
    "tests/threads/test_torch_state.py",
    "tests/threads/test_versions.py",
    "tests/threads/test_whereabouts.py",
    "tests/threads/test_wrap.py",
    "tests/unit/test_agents.py",
    "tests/unit/test_doctor.py",
    "tests/unit/test_doctor_gpu.py",
    "tests/unit/test_lease.py",
    "tests/unit/test_gpu.py",
    "tests/unit/test_health_check.py",
    "tests/unit/test_leftovers.py",
    "tests/unit/test_light_torch.py",
    "tests/unit/test_migration.py",
    "tests/unit/test_mutants.py",
    "tests/unit/test_nested_restarter.py",
    "tests/unit/test_parsers.py",
    "tests/unit/test_rank_assignment.py",
    "tests/unit/test_tree.py",
)
ONE_TEST = "tests/unit/test_inject_fault.py::test_exceptions_reach_the_main_thread[workload]"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def arguments() -> list[str]:
    """What pytest is to run here."""
    if has_torch():
        return []
    return [*FOLDERS, *(f"--ignore={path}" for path in NEED_TORCH), f"--deselect={ONE_TEST}"]


def row(summary: str) -> str:
    """A row of the table in docs/versions.md."""
    torch = importlib.metadata.version("torch") if has_torch() else "none"
    what = "the whole suite" if has_torch() else "without torch"
    return f"| {datetime.date.today()} | {platform.python_version()} | {torch} | {what} | {counts(summary)} |"


def counts(summary: str) -> str:
    """How many tests passed and how many did not, out of pytest's last line."""
    return ", ".join(re.findall(r"\d+ (?:failed|passed|skipped|error)\w*", summary)) or summary


def run(*command: str) -> tuple[int, str]:
    """Run this Python; answers its exit status and the last line that it printed."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    return process.wait(), last


def main() -> int:
    status, _ = run("-W", "error", "-m", "compileall", "-q", "-f", "inprocess")
    if status == 0:
        status, summary = run("-m", "pytest", "-q", *arguments(), *sys.argv[1:])
        print(row(summary))
    return status


if __name__ == "__main__":
    sys.exit(main())
