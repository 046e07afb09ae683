"""A machine with one GPU, lent for minutes: `python -m tests.gpu.lease --seconds 540 --out DIR`.

Runs the rows of `ROWS` in their order, each in a process of its own with a limit. After each row it writes what is
known to `DIR/result.json`, `DIR/page.md` and `DIR/rows.log`, so a machine that goes away costs one row. Needs Python,
torch, psutil and pytest; `--device cpu` is a dry run. Touches no CUDA itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
#: every process of a row has it in its environment
MARK = "GPU_LEASE_ROW"
#: a line of a row's output with figures begins so; JSON follows
FIGURES = "LEASE "
#: seconds: for helpers to end behind the row that started them; until processes that were asked to end are killed;
#: until killed ones are left alone; to write results
BEHIND, GRACE, GONE, RESERVE = 2.0, 3.0, 10.0, 5.0
#: bytes of a row's output that are kept, and lines of it that the page shows where the row failed
KEPT, SHOWN = 200_000, 60
#: hooks that older versions of pytest set anew for each test look like leftovers: without the plugins that do so
PYTEST = (
    "-m", "pytest", "-c", "tests/gpu/lease.ini", "--rootdir=.", "--confcutdir=.", "-s", "-rA", "--tb=short",
    "--durations=0", *(f"-pno:{plugin}" for plugin in ("timeout", "unraisableexception", "threadexception")),
)  # fmt: skip
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
OVER, LEFT_OUT = "over limit", "left out"


@dataclass(frozen=True)
class Row:
    """One thing to learn, by one process."""

    name: str
    teaches: str
    #: for Python; {out} and {device} are filled in
    command: tuple[str, ...]
    #: seconds after which it is ended
    limit: float
    #: it is not begun with fewer seconds left
    least: float = 25.0
    #: a module that must be there
    module: str = ""
    #: whether it needs CUDA: skipped in a dry run
    cuda: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    #: a file of results with figures, below {out}
    results: str = ""


@dataclass
class Result:
    """How one row went."""

    row: str
    outcome: str
    seconds: float = 0.0
    note: str = ""
    #: of pytest, by test: outcome
    tests: dict[str, str] = field(default_factory=dict)
    figures: list[Any] = field(default_factory=list)
    tail: str = ""


def tests(name: str, teaches: str, *nodes: str, limit: float = 90.0, **more: Any) -> Row:
    """A row of tests in this folder."""
    return Row(name, teaches, (*PYTEST, *(f"tests/gpu/test_{node}" for node in nodes)), limit, **more)


def benchmark(name: str, teaches: str, *options: str, limit: float, module: str = "benchmarks.gpu") -> Row:
    """A row that measures, and writes its own results."""
    file = f"{name.replace(' ', '_')}.json"
    command = ("-m", module, "--device", "{device}", *options, "--results", f"{{out}}/{file}")
    return Row(name, teaches, command, limit, least=40.0, module=module, results=file)


#: in the order of what they teach
ROWS = (
    tests("exception", "one of two ranks raises while the other waits on the GPU", "faults.py::test_an_exception[-2]"),
    tests("kill", "one of two ranks is killed", "faults.py::test_a_killed_rank[1-2]"),
    tests("hang in a kernel", "a kernel that never ends",
          "faults.py::test_an_endless_kernel_that_its_rank_waits_for[2]",
          "faults.py::test_an_endless_kernel_is_found_by_the_health_check[2]", limit=130.0, cuda=True),
    tests("abort times", "how long the abort takes, with NCCL's threads woken and not", "lent.py::test_abort_times"),
    tests("memory", "the GPU's memory after restarts, and after all ranks", "lent.py::test_memory_is_given_back"),
    tests("CUDA graphs", "an abort with graphs that captured a collective",
          "groups.py::test_a_graph_that_captured_a_collective[of the function-2]",
          "groups.py::test_a_graph_that_captured_a_collective[kept by the program-2]", limit=130.0, cuda=True),
    tests("DDP bit for bit", "the same parameters as without a fault", "lent.py::test_ddp_is_the_same_bit_for_bit",
          limit=150.0),
    tests("coalesced batch", "an interruption inside batch_isend_irecv", "lent.py::test_a_coalesced_batch"),
    tests("bootstrap", "a rank dies while NCCL makes its communicator",
          *(f"groups.py::test_a_rank_dies_while_the_others_make_the_group[{step}-{victim}-2]"
            for step in ("made", "enter") for victim in (0, 1)), limit=120.0),
    tests("eager", "init_process_group(device_id=...)", "faults.py::test_an_exception[eager-2]", cuda=True),
    tests("backends", "nccl2 and nccl-legacy, where torch has them", "lent.py::test_other_backends", limit=120.0),
    benchmark("benchmark restart", "phases of a restart", "--only", "restart", "--case", "exception", "--case", "kill",
              "--ranks", "2", "--quick", limit=120.0),
    benchmark("benchmark training", "a restart in a real training, and in an empty function", "--quick", limit=120.0,
              module="benchmarks.training"),
    tests("sleep and stop", "a rank that sleeps, and one that is stopped", "faults.py::test_a_sleeping_rank[2]",
          "faults.py::test_a_stopped_rank[2]", limit=130.0),
    tests("lost context", "a lost CUDA context, and a full GPU", "faults.py::test_a_lost_context[2]",
          "faults.py::test_out_of_memory[2]", limit=130.0, cuda=True),
    tests("groups", "pairs, a mesh, Gloo beside NCCL", "groups.py::test_pending_collectives[raises-mesh-2]",
          *(f"groups.py::test_pending_collectives[{fault}-{kind}-2]"
            for kind in ("subgroups", "mixed") for fault in ("raises", "dies")), limit=180.0),
    tests("live state", "a state that comes back over NCCL",
          *(f"training.py::test_{what}[2]" for what in ("a_lagging_rank_gets_the_state_of_another_one",
                                                       "a_torn_state_is_replaced", "a_replacement_gets_the_state")),
          limit=150.0),
    tests("four ranks", "the same with four ranks", "faults.py::test_an_exception[-4]",
          "faults.py::test_a_killed_rank[0-4]", "training.py::test_ddp[dies-4]", limit=150.0),
    benchmark("benchmark step", "what a step costs", "--only", "step", "--quick", limit=80.0),
    tests("many restarts", "what a hundred restarts leave", "training.py::test_many_restarts_leave_nothing[2]",
          limit=200.0),
    tests("example", "examples/digits_ddp.py", "training.py::test_the_example[2]"),
)  # fmt: skip


# --- processes ----------------------------------------------------------------------------------------------------


def of_the_row(mark: str, pid: int | None = None) -> list[psutil.Process]:
    """All processes with that mark, and all that descend from ``pid``, in whatever session they are."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        found |= set(psutil.Process(pid).children(recursive=True)) if pid else set()
    entry = f"{MARK}={mark}".encode()
    for each in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if each.pid != os.getpid() and entry in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0"):
                found.add(each)
    return [each for each in found if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def end_all(mark: str, process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Ask everything of a row to end, then kill it, by process id: how many there were, and how many still run."""
    met: set[psutil.Process] = set()
    end, act, until = time.monotonic() + GRACE + GONE, psutil.Process.terminate, time.monotonic() + GRACE
    while left := of_the_row(mark, process.pid if process.poll() is None else None) + _alone(process):
        for each in set(left) - met if act is psutil.Process.terminate else left:
            with contextlib.suppress(psutil.Error):
                act(each)
        met |= set(left)
        if time.monotonic() > end:
            return len(met), len(left)
        if time.monotonic() > until:
            act = psutil.Process.kill
        psutil.wait_procs(left, 0.2)
    return len(met), 0


def _settle(mark: str) -> None:
    """Let helpers end by themselves: they see only now that the row has ended. Maybe nobody reaps them."""
    until = time.monotonic() + BEHIND
    while of_the_row(mark) and time.monotonic() < until:
        time.sleep(0.05)


def _alone(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The row's first process, should it run without the mark."""
    with contextlib.suppress(psutil.Error):
        return [psutil.Process(process.pid)] if process.poll() is None else []
    return []


def run(row: Row, limit: float, fill: dict[str, str], log: Path) -> Result:
    """One row, whatever it does: nothing of it runs when this returns, or it says how many processes do."""
    command = [sys.executable, *(_filled(part, fill) for part in row.command)]
    mark, began, outcome = uuid.uuid4().hex, time.monotonic(), OVER
    with tempfile.TemporaryDirectory(prefix="lease-", ignore_cleanup_errors=True) as folder:
        printed = Path(folder, "output")
        paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | row.environment | {
            MARK: mark, "INPROCESS_GPU_TESTS_ON": fill["device"], "TMPDIR": folder, "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(paths), "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        }  # fmt: skip
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    outcome = FAILED if process.wait(limit) else PASSED
                if outcome != OVER:
                    _settle(mark)
            finally:
                met, left = end_all(mark, process)
                result = Result(row.name, outcome, round(time.monotonic() - began, 1))
                text = _last(printed)
                with log.open("a") as whole:
                    whole.write(f"\n===== {row.name}: {outcome}, {result.seconds} s: {' '.join(command)}\n{text}\n")
    read(result, text)
    read_file(result, Path(fill["out"], row.results) if row.results else None)
    if outcome != OVER and met:
        result.note += f"; {met} processes were left and ended"
    if left:
        result.note += f"; {left} processes could not be ended"
    result.note = result.note.lstrip("; ")
    return result


def _filled(text: str, fill: dict[str, str]) -> str:
    for name, value in fill.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _last(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - KEPT))
        return file.read().decode(errors="replace")


# --- what rows say ------------------------------------------------------------------------------------------------

_TEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?:\[\d+\] )?(\S+?::.*?|tests\S+?:\d+)((?: - |: ).*)?$")
_SUMMARY = re.compile(r"^=* ?((?:\d+ \w+,? ?)+) in [\d.]+s", re.MULTILINE)


def read(result: Result, text: str) -> None:
    """What the output tells: outcome of each test, figures, and the end where something is wrong."""
    for line in text.splitlines():
        if FIGURES in line:
            with contextlib.suppress(ValueError):
                result.figures.append(json.loads(line.partition(FIGURES)[2]))
        elif found := _TEST.match(line):
            result.tests[found[2].rpartition("/")[2]] = found[1].lower() + (found[3] or "").replace(" - ", ": ")
    if summaries := _SUMMARY.findall(text):
        result.note = summaries[-1].strip()
        if result.outcome == PASSED and "passed" not in result.note and "skipped" in result.note:
            result.outcome = SKIPPED
    if result.outcome not in (PASSED, SKIPPED):
        result.tail = "\n".join(line[:300] for line in text.splitlines()[-SHOWN:])


def read_file(result: Result, path: Path | None) -> None:
    """Medians of a benchmark's own file."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text()) if path else {}
        entries = found.get("entries", {}) if isinstance(found, dict) else {}
        dropped = ("stderr", "errors", "leaving")
        result.figures += [
            {"entry": key, **{name: value for name, value in entry.items() if name not in dropped}}
            for key, entry in entries.items()
        ]


def about_machine(device: str) -> dict[str, Any]:
    """What this is measured on, asked in another process."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.machine"],
            check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"error": repr(error)}


# --- what is written ----------------------------------------------------------------------------------------------


def page(machine: dict[str, Any], rows: Sequence[Row], results: Sequence[Result]) -> str:
    """All of it in Markdown."""
    teaches = {row.name: row.teaches for row in rows}
    lines = ["# What a machine with one GPU showed", ""]
    lines += [f"* {name}: {value}" for name, value in machine.items() if value]
    lines += ["", "| row | what it teaches | outcome | s | note |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {each.row} | {teaches.get(each.row, '')} | {each.outcome} | {each.seconds:g} | {each.note} |"
        for each in results
    ]
    for each in results:
        wrong = {name: outcome for name, outcome in each.tests.items() if outcome != "passed"}
        if each.figures or each.tail or wrong:
            lines += ["", f"## {each.row}", ""]
        lines += [f"* `{name}` {outcome}" for name, outcome in wrong.items()]
        lines += [f"* `{json.dumps(figure)}`" for figure in each.figures]
        if each.tail:
            lines += ["", "```text", each.tail.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def write_all(out: Path, machine: dict[str, Any], rows: Sequence[Row], results: Sequence[Result]) -> None:
    found = {"machine": machine, "rows": [dataclasses.asdict(each) for each in results]}
    write(out / "result.json", json.dumps(found, indent=1) + "\n")
    write(out / "page.md", page(machine, rows, results))


# --- the command --------------------------------------------------------------------------------------------------


def choose(rows: Sequence[Row], only: Iterable[str], first: str) -> list[Row]:
    """Rows by name. Raises ValueError for a name that none has."""
    names = [row.name for row in rows]
    for name in (*only, *([first] if first else [])):
        if name not in names:
            raise ValueError(f"there is no row {name!r}; rows are: {', '.join(names)}")
    later = rows[names.index(first) :] if first else rows
    return [row for row in later if not only or row.name in only]


def why_not(row: Row, device: str, left: float) -> tuple[str, str]:
    """Outcome and reason of a row that is not begun, or nothing."""
    if row.cuda and device == "cpu":
        return SKIPPED, "needs CUDA"
    if row.module and importlib.util.find_spec(row.module) is None:
        return SKIPPED, f"there is no {row.module}"
    if left < min(row.least, row.limit):
        return LEFT_OUT, f"{left:.0f} s are left"
    return "", ""


def lease(rows: Sequence[Row], seconds: float, out: Path, device: str,
          machine: Callable[[str], dict[str, Any]] = about_machine) -> list[Result]:  # fmt: skip
    """Run what fits; results are on disk after each row."""
    end = time.monotonic() + seconds - RESERVE
    out.mkdir(parents=True, exist_ok=True)
    about, results = machine(device), []
    write_all(out, about, rows, results)
    for row in rows:
        left = end - time.monotonic() - GRACE
        outcome, reason = why_not(row, device, left)
        if outcome:
            result = Result(row.name, outcome, note=reason)
        else:
            result = run(row, min(row.limit, left), {"out": str(out), "device": device}, out / "rows.log")
        results.append(result)
        print(f"{result.row}: {result.outcome}, {result.seconds:g} s {result.note}".rstrip(), flush=True)
        write_all(out, about, rows, results)
    return results


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.lease", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=540.0, help="for all rows together (default 540)")
    add("--out", type=Path, default=Path("lease"), metavar="DIR", help="folder of the results (default: lease)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with Gloo")
    add("--only", action="append", default=[], metavar="ROW", help="this row; may be given more than once")
    add("--from", dest="first", default="", metavar="ROW", help="this row and those after it")
    add("--list", action="store_true", help="print the rows, and run none")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        rows = choose(ROWS, options.only, options.first)
    except ValueError as error:
        parser().error(str(error))
    if options.list:
        print("\n".join(f"{row.name} (at most {row.limit:g} s): {row.teaches}" for row in rows))
        return 0
    # the row that runs is ended, also where the lease itself is asked to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = lease(rows, options.seconds, options.out.resolve(), options.device)
    return int(any(each.outcome in (FAILED, OVER) for each in results))


if __name__ == "__main__":
    sys.exit(main())
