"""Runs the benchmarks, contenders in turn (A B A B ...), and prints tables: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import peers, report, training_report
from benchmarks.job import ENVIRONMENT, here
from benchmarks.plan import CASES, GOODPUT, HANG, Case, Contender

#: attempts of a contender that does not go on
ATTEMPTS_OF_STUCK = 3
#: whole minutes of training are rarer
ATTEMPTS_OF_GOODPUT = 2


class Scripts:
    """Runs scripts; one that restarts ranks stays loaded, since importing torch takes longer than measuring."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, subprocess.Popen[str]] = {}

    def run(self, case: Case, contender: Contender, seed: int) -> dict[str, Any]:
        arguments = [*shlex.split(case.arguments), *shlex.split(contender.arguments)]
        script = contender.script or case.script
        python = str(peers.python(self._folder, contender.peer))
        if script == "restart" and "torchrun" not in arguments:
            return self._ask(python, arguments)
        if script == "torchft_restart":
            arguments = [*shlex.split(contender.arguments), "--victim", "1", "--limit", str(HANG)]
        if case is GOODPUT:
            arguments += ["--seed", "0" if contender.name == "no library" else str(seed)]
        command = [python, "-W", "ignore", "-m", f"benchmarks.{script}", *arguments]
        done = subprocess.run(command, check=False, **self._streams)
        return self._result(done.stdout)

    def _ask(self, python: str, arguments: Sequence[str]) -> dict[str, Any]:
        if python not in self._loaded:
            command = [python, "-W", "ignore", "-m", "benchmarks.restart", "--serve"]
            self._loaded[python] = subprocess.Popen(command, stdin=subprocess.PIPE, **self._streams)
        process = self._loaded[python]
        assert process.stdin and process.stdout
        process.stdin.write(shlex.join(arguments) + "\n")
        process.stdin.flush()
        return self._result(process.stdout.readline())

    @property
    def _streams(self) -> dict[str, Any]:
        environment = os.environ | ENVIRONMENT
        return {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
            "env": environment,
            "cwd": here(),
        }

    @staticmethod
    def _result(text: str) -> dict[str, Any]:
        lines = text.strip().splitlines()
        return json.loads(lines[-1]) if lines else {"values": {}, "note": "the script failed"}

    def close(self) -> None:
        for process in self._loaded.values():
            assert process.stdin
            process.stdin.close()
            process.wait()


def turns(case: Case, repetitions: int) -> Iterator[tuple[int, Contender]]:
    """A B A B ...; a contender that is stuck takes part in the first rounds only."""
    most = min(repetitions, ATTEMPTS_OF_GOODPUT) if case is GOODPUT else repetitions
    for number in range(most):
        yield from ((number, contender) for contender in case.contenders)
        if number < ATTEMPTS_OF_STUCK:
            yield from ((number, contender) for contender in case.stuck)


def measure(case: Case, repetitions: int, scripts: Scripts) -> dict[str, list[dict[str, Any]]]:
    """Contender -> its results."""
    found: dict[str, list[dict[str, Any]]] = {}
    begin = time.monotonic()
    print(report.key(case), end="", flush=True)
    for number, contender in turns(case, repetitions):
        result = scripts.run(case, contender, number + 1)
        found.setdefault(contender.name, []).append(result)
        print("." if result["values"] else "x", end="", flush=True)
    print(f" {time.monotonic() - begin:.0f} s", flush=True)
    return found


def machine(before: str = "") -> dict[str, str]:
    """Where this was measured; ``before``: when the rows that stay were."""
    today = datetime.date.today().isoformat()
    return {
        "date": today if before in ("", today) else f"{before.partition(' to ')[0]} to {today}",
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
        "inprocess": version("inprocess"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a word that the benchmark's or the case's name contains")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--peers", type=Path, default=here() / ".nox" / "peers", help="folder of their environments")
    parser.add_argument("--results", type=Path, default=here() / "benchmarks" / "results.json")
    parser.add_argument("--tables", type=Path, default=here() / "docs" / "performance")
    parser.add_argument("--no-run", action="store_true", help="tables and picture of the results that are there")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {"machine": {}, "cases": {}}
    known = {report.key(case) for case in CASES}
    results["cases"] = {name: entry for name, entry in results["cases"].items() if name in known}
    scripts = Scripts(options.peers)
    try:
        for case in CASES if not options.no_run else ():
            if options.only in report.key(case):
                found = measure(case, options.repetitions, scripts)
                results["machine"] = machine(results["machine"].get("date", "") if options.only else "")
                results["cases"][report.key(case)] = {name: report.condense(runs) for name, runs in found.items()}
                options.results.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        scripts.close()
    print(report.tables(results))
    kept = training_report.read()
    report.write(results, options.tables, training_report.quotes(kept), training_report.where(kept))


if __name__ == "__main__":
    main()
