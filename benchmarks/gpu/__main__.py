"""Restarts, training steps and live recovery with NCCL ranks: `python -m benchmarks.gpu --help`.

One GPU is enough: several ranks share it. Every attempt has a limit, after which it is ended and the next one begins.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.gpu import results
from benchmarks.gpu.place import SHARED, WITHOUT_CUDA, Place
from benchmarks.gpu.plan import BUDGET, CASES, PARTS, QUICK, Request, requests
from benchmarks.job import ENVIRONMENT, here

#: seconds, beside an attempt's own limit, for the server to load torch and to end ranks
MARGIN = 40.0
#: seconds that ended processes get to be gone: one that the driver holds may take for ever
GONE = 5.0
#: characters of what a failed attempt printed that are kept
KEPT = 4000


class Server:
    """A process that measures; one that does not answer in time is ended, with all that it has started."""

    def __init__(self, place: Place, log: IO[bytes]) -> None:
        self._place, self._log = place, log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Request) -> dict[str, Any]:
        """Measure once. Never raises for what happens there."""
        printed = os.fstat(self._log.fileno()).st_size
        found = self._answer(request)
        if found["note"]:
            found["stderr"] = self._tail(printed)
        return found

    def _answer(self, request: Request) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
            process.stdin.flush()
            ready = select.select([process.stdout], [], [], request.limit + MARGIN)[0]
            line = process.stdout.readline() if ready else ""
        except OSError:
            line = ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.end()
        return {"values": {}, "note": f"no answer within {request.limit + MARGIN:g} s, or the measurement failed"}

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.server"]
        command += [self._place.kind, str(self._place.count)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=here(),
            env=os.environ | ENVIRONMENT | WITHOUT_CUDA,
        )  # fmt: skip
        return self._process

    def _tail(self, since: int) -> str:
        with open(self._log.name, "rb") as log:
            log.seek(max(since, os.fstat(log.fileno()).st_size - KEPT))
            return log.read().decode(errors="replace")

    def end(self) -> None:
        """Kill the server and its ranks, by their ids."""
        process, self._process = self._process, None
        if process is None:
            return
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(process.pid).children(recursive=True)
        for child in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        psutil.wait_procs(found, GONE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GONE)
        for stream in (process.stdin, process.stdout):
            assert stream
            with contextlib.suppress(OSError):
                stream.close()


# --- what is measured ---------------------------------------------------------------------------------------------


def chosen(options: argparse.Namespace, part: str) -> list[Request]:
    """The part's requests that were not left out by options."""
    found = requests(options.device, part, options.quick)
    if options.ranks:
        found = [request for request in found if request.world_size in options.ranks]
    if options.case and part == "restart":
        found = [request for request in found if request.case in options.case]
    return found


def measure(options: argparse.Namespace, part: str, server: Server) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each request's key and what all its runs said, after every run."""
    end = time.monotonic() + (QUICK if options.quick else BUDGET)[part] * options.patience
    runs: dict[str, list[dict[str, Any]]] = {}
    for request in chosen(options, part):
        left = end - time.monotonic()
        if left <= 0:
            print(f"{part}: the time for it is over", flush=True)
            return
        found = server.ask(request.within(left))
        runs.setdefault(request.key, []).append(found)
        say(request.key, found)
        yield request.key, results.collect(runs[request.key])


def say(key: str, found: Mapping[str, Any]) -> None:
    print(f"{key}: {found['note'] or shortly(found['values'])}", flush=True)
    if found["note"] or found.get("errors"):
        print("\n".join([*found.get("errors", ()), found.get("stderr", "")]).strip(), flush=True)


def shortly(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# --- the command --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: Gloo and small sizes, to try it without a GPU")
    add("--only", choices=PARTS, action="append", help="this part; may be given more than once (default: all)")
    add("--case", choices=[case.name for case in CASES], action="append", help="of restarts, only these faults")
    add("--ranks", type=int, choices=(1, 2, 4), action="append", help="only with so many ranks")
    add("--quick", action="store_true", help="each thing once or twice, and the small state only")
    add("--patience", type=float, default=1.0, metavar="X", help="X times the usual time for each part (default 1)")
    add("--results", type=Path, help="JSON file (default: benchmarks/gpu/results.json, and none for --device cpu)")
    add("--table", action="store_true", help="only print the tables of the results that are there")
    return parser


def machine(kind: str) -> dict[str, Any]:
    """What is measured on. Exits with 2 where it is not there."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.machine"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=here(), timeout=180)
    return checked(kind, json.loads(done.stdout.splitlines()[-1]))


def checked(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """With the device that was asked for. Exits with 2 where the machine has none, or torch cannot use it."""
    if kind == "cpu":
        return found | {"gpus": [], "device": kind, "backend": "gloo", "shared": {}}
    lacking = ""
    if not found["cuda"]:
        lacking = f"torch {found['torch']} is built without CUDA: install a build with it"
    elif not found["gpus"]:
        lacking = "torch finds no CUDA device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    elif not found["nccl"]:
        lacking = f"torch {found['torch']} is built without NCCL: install a build with it"
    if lacking:
        print(f"{lacking}; or try the benchmarks without a GPU: --device cpu", file=sys.stderr)
        sys.exit(2)
    return found | {"device": kind, "backend": "nccl", "shared": SHARED}


def load(path: Path | None) -> dict[str, Any]:
    """Results that are there: parts of them may be measured anew."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    options = parser().parse_args()
    default = here() / "benchmarks" / "gpu" / "results.json"
    path = options.results or (default if options.device == "cuda" else None)
    if options.table:
        print(results.tables(load(path)))
        return
    about = machine(options.device)
    place = Place(options.device, len(about["gpus"]))
    print(results.describe(about), flush=True)
    found = {"machine": about, "entries": {}}
    before = load(path)
    if before.get("machine") == about:  # the same day, on the same machine
        found["entries"] = before["entries"]
    with tempfile.NamedTemporaryFile(prefix="inprocess-benchmark-", suffix=".log") as log:
        server = Server(place, log)
        try:
            for part in options.only or PARTS:
                for key, entry in measure(options, part, server):
                    found["entries"][key] = entry
                    if path is not None:
                        path.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            server.end()
    print("\n" + results.tables(found))


if __name__ == "__main__":
    main()
