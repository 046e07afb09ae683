"""`inprocess metrics` as a process of its own, and what it answers."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: longest wait for a program to begin (seconds)
READY = 20.0
PREFIX = "inprocess metrics: "


def get(url: str, seconds: float = 10.0) -> str:
    """What is at a URL. Raises urllib.error.URLError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as answer:
        return str(answer.read().decode())


def get_json(url: str) -> Any:
    return json.loads(get(url))


@contextlib.contextmanager
def serving(run_dir: Path, *options: str) -> Iterator[str]:
    """The program serves this directory on a free port; its address, without a path."""
    command = [sys.executable, "-m", "inprocess", "metrics", str(run_dir), "--listen", "0", *options]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)) as process:
        yield address(first_line(process))


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """It is killed at the end, whatever it does."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], READY)[0], "the program said nothing"
    return process.stdout.readline().decode().strip()


def address(line: str) -> str:
    """From its first line."""
    assert line.startswith(f"{PREFIX}http://127.0.0.1:") and line.endswith("/metrics"), line
    return line.removeprefix(PREFIX).removesuffix("/metrics")


def until(url: str, what: str, deadline: float) -> str:
    """Ask until the answer has this in it: nothing tells when a program has read a file."""
    while True:
        text = get(url)
        if what in text:
            return text
        assert time.monotonic() < deadline, text
        select.select([], [], [], 0.05)


__all__ = ["address", "ended", "first_line", "get", "get_json", "serving", "until"]
