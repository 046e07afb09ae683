"""``inprocess status [RUN_DIR | HOST:PORT]``: how every rank is now, one line each, and where, if asked."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence

from inprocess.attribution import one_line
from inprocess.reports import dump
from inprocess.reports.live_reading import RankNow, current, fetch, read
from inprocess.system import clock
from inprocess.system.descriptors import shortage
from inprocess.system.listening import connect_address

__all__ = ["main", "table"]

#: between two looks with ``--watch`` (seconds)
INTERVAL_S = 2.0
#: with ``--dump``: how long the answers are waited for, if nothing else is said, and at most (seconds)
TIMEOUT_S, MAX_TIMEOUT_S = 10.0, 600.0
ADDRESS = re.compile(r"(?:http://)?((?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):\d+)/?")
HEADS = ("rank", "host", "pid", "phase", "iteration", "step", "progress", "heartbeat", "memory", "state")
#: clear the screen from its top
CLEAR = "\x1b[H\x1b[J"


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit code: 0, 1 where ``--dump`` lacks a rank's stacks, 2 where there is nothing to show."""
    given = _parser().parse_args(list(arguments))
    source = given.source or os.environ.get("INPROCESS_RUN_DIR", "")
    try:
        problem = _problem(source, given)
        if problem:
            print(f"inprocess status: {problem}", file=sys.stderr)
            return 2
        if given.dump:
            return _dump(source, given.timeout, given.json)
        return _watch(source, given.json) if given.watch else _show(source, given.json)
    except BrokenPipeError:  # `| head`
        raise
    except OSError as error:
        print(f"inprocess status: {one_line(shortage(error) or str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0 if given.watch else 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inprocess status", description="How every rank of a job is now.")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="RUN_DIR | HOST:PORT",
        help="run directory of the job, or address of its metrics; without it the variable INPROCESS_RUN_DIR",
    )
    parser.add_argument("--watch", action="store_true", help="again every 2 s, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="for programs; docs/status.md has the fields")
    parser.add_argument("--dump", action="store_true", help="ask every rank for its stacks, now; nothing else happens")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"with --dump: how long the answers are waited for (default {TIMEOUT_S:g})",
    )
    return parser


def _problem(source: str, given: argparse.Namespace) -> str:
    """What is wrong with the command line; empty: nothing."""
    if not source:
        return "name the run directory of the job, or HOST:PORT of its metrics, or set INPROCESS_RUN_DIR"
    if given.dump and given.watch:
        return "--dump asks once: leave --watch out"
    if given.dump and _address(source):
        return f"--dump needs the run directory: {source} only tells how the ranks are"
    if address := _address(source):
        try:
            connect_address(address)
        except ValueError as error:
            return f"{source}: {error}"
    if not 0 < given.timeout <= MAX_TIMEOUT_S:
        return f"--timeout {given.timeout:g} is not between 0 and {MAX_TIMEOUT_S:g} seconds"
    return ""


def _address(source: str) -> str:
    """``HOST:PORT``, where the source is one."""
    found = None if os.path.isdir(source) else ADDRESS.fullmatch(source)
    return found[1] if found else ""


def _look(source: str) -> tuple[list[tuple[str, Sequence[RankNow]]], list[str]]:
    """Raises OSError, also where there is no rank."""
    address = _address(source)
    found, problems = fetch(address) if address else read(source)
    if not found:
        raise OSError("; ".join([f"{source} says nothing of any rank", *problems[:3]]))
    return current(found), problems


def _show(source: str, as_json: bool) -> int:
    jobs, problems = _look(source)
    if as_json:
        ranks = [rank.to_json() for _, ranks in jobs for rank in ranks]
        print(json.dumps({"ranks": ranks, "problems": problems}, indent=2))
        return 0
    for problem in problems:
        print(f"inprocess status: {problem}", file=sys.stderr)
    print("\n".join(line for job, ranks in jobs for line in table(job, ranks)))
    return 0


def _watch(source: str, as_json: bool) -> int:
    """Until somebody ends it. What goes wrong meanwhile may come right again: the directory comes with the job."""
    is_screen = sys.stdout.isatty() and not as_json
    pause = threading.Event()
    while True:
        begin = clock.monotonic()
        try:
            jobs, problems = _look(source)
            lines = [line for job, ranks in jobs for line in table(job, ranks)]
            ranks = [rank.to_json() for _, ranks in jobs for rank in ranks]
        except OSError as error:
            lines, ranks, problems = [one_line(str(error))], [], [one_line(str(error))]
        if as_json:
            print(json.dumps({"ranks": ranks, "problems": problems}), flush=True)
        elif is_screen:
            print(CLEAR + "\n".join(_fitting(lines, *shutil.get_terminal_size())), flush=True)
        else:
            print("\n".join([*lines, ""]), flush=True)
        pause.wait(max(0.0, INTERVAL_S - (clock.monotonic() - begin)))


def _fitting(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """As many lines as the screen has, none of them longer than it is wide."""
    shown = [line[: max(1, columns)] for line in lines]
    if len(shown) < rows:
        return shown
    kept = max(1, rows - 2)
    return [*shown[:kept], f"... and {len(shown) - kept} lines more"]


def _dump(source: str, timeout: float, as_json: bool) -> int:
    jobs, problems = _look(source)
    code = 0
    for job, ranks in jobs:
        answers = dump.ask(source, ranks, timeout)
        running = {rank.live["initial_rank"] for rank in ranks if rank.is_running}
        if any(not answers[number]["threads"] for number in running):
            code = 1
        if as_json:
            print(json.dumps({"job": job, "ranks": list(answers.values()), "problems": problems}, indent=2))
        else:
            print("\n".join([_summary(job, ranks), *dump.lines(answers)]))
    return code


# --- text --------------------------------------------------------------------------------------------------------


def table(job: str, ranks: Sequence[RankNow]) -> list[str]:
    """A line that sums up, and one for each rank."""
    rows = [HEADS, *map(_row, ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [_summary(job, ranks), *lines]


def _summary(job: str, ranks: Sequence[RankNow]) -> str:
    there = [rank for rank in ranks if rank.is_running and not rank.is_stale]
    latest = max(there or ranks, key=lambda rank: (rank.live["call"], rank.live["iteration"])).live
    size, reserves = latest["world_size"], latest["reserves"]
    told = [f"world size {'?' if size is None else size}"]
    told += [f"{reserves} reserve{'s' * (reserves > 1)}"] if reserves else []
    told += [f"iteration {latest['iteration']}"] if latest["iteration"] >= 0 else ["not begun"]
    counts = {state: sum(rank.live["state"] == state for rank in ranks) for state in ("left", "dead")}
    counts["stale"] = sum(rank.is_stale for rank in ranks)
    told += [f"{count} {state}" for state, count in counts.items() if count]
    return f"{len(there)} of {len(ranks)} ranks running, {', '.join(told)}; job {one_line(job, 100)}"


def _row(rank: RankNow) -> tuple[str, ...]:
    live = rank.live
    number = str(live["initial_rank"])
    if live["rank"] != live["initial_rank"] and live["role"] != "unknown":
        number += f" -> {live['rank']}"
    return (
        number,
        one_line(live["host"], 40),
        str(live["pid"]),
        one_line(live["phase"], 40) + (", atomic" if live.get("atomic") is True else ""),
        str(live["iteration"]) if live["iteration"] >= 0 else "-",
        str(live["steps"]),
        _seconds(live["progress_age"]),
        _seconds(live["heartbeat_age"]),
        _bytes(live["memory_bytes"]),
        _state(rank),
    )


def _state(rank: RankNow) -> str:
    live = rank.live
    if rank.is_stale:
        return f"stale for {_seconds(rank.age)}"
    if live["state"] == "running" and live.get("process_state") in ("T", "t"):
        return "stopped"
    return "reserve" if live["state"] == "running" and live["role"] == "reserve" else str(live["state"])


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min" if value < 36_000 else f"{value / 3600:.0f} h"


def _bytes(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.0f} MiB" if value < 10 * 2**30 else f"{value / 2**30:.1f} GiB"
