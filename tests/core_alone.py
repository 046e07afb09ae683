"""A restart without everything around the core: `python -m tests.core_alone`.

Copies the files of the first ring, and those only, to a temporary folder, and runs `examples/minimal.py` there with two
ranks: one raises, one hangs, one is killed. Prints files and lines of each ring.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "inprocess"
#: a whole job (seconds)
LIMIT = 120.0
#: what the example does in its place, once
FAULTS = {
    "an exception": 'raise RuntimeError("a fault, once")',
    "a hang": "__import__('time').sleep(3600)",
    "a killed rank": f"os.kill(os.getpid(), {int(signal.SIGKILL)})",
}
EMPTY = '"""The composition root of a core alone: nobody implements what it could do without."""\n'


def rings() -> list[tuple[str, ...]]:
    """Of the table in the architecture document: rooms of the first two, all others are the third."""
    text = (ROOT / "docs/design/architecture.md").read_text()
    cells = re.findall(r"^\| (?:core|extensions) \|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    return [tuple(re.findall(r"`([\w/]+)`", cell)) for cell in cells]


def ring(file: str) -> int:
    """1 to 3, of a file by its path inside the package: that of the longest name in the table that it begins with."""
    names = {
        name if name.endswith("/") else f"{name}.py": number for number, row in enumerate(rings(), 1) for name in row
    }
    fitting = [name for name in names if file == name or (name.endswith("/") and file.startswith(name))]
    return names[max(fitting, key=len)] if fitting else 3


def copy(folder: Path) -> None:
    """The package with its first ring, and a composition root that names nobody."""
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if ring(file) == 1 or file == "__init__.py":
            (folder / "inprocess" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "inprocess" / file)
    (folder / "inprocess" / "composition.py").write_text(EMPTY)


def example(folder: Path, fault: str) -> Path:
    """With another fault, and limits by which a hang is noticed soon."""
    text = (ROOT / "examples/minimal.py").read_text()
    for before, after in (
        ('raise RuntimeError("a fault, once")', FAULTS[fault]),
        ("soft_timeout=30, hard_timeout=45", "soft_timeout=2, hard_timeout=4, heartbeat_timeout=3"),
    ):
        assert before in text, f"examples/minimal.py has no {before}"
        text = text.replace(before, after)
    (path := folder / "minimal.py").write_text(text)
    return path


def run(folder: Path, fault: str, port: int) -> Sequence[tuple[int, str]]:
    """Status and output of each rank."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("INPROCESS", "PYTHON"))}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"CHECKPOINT": str(folder / f"{port}.pt"), "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    script = example(folder, fault)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def survives(fault: str, results: Sequence[tuple[int, str]]) -> bool:
    """Whether the job has trained to the end: with the rank that was not killed, at least."""
    (first, output), (second, _) = results
    ended = second == -signal.SIGKILL if "killed" in fault else second == 0
    return first == 0 and ended and "the weights are right" in output and "continuing with" in output


def table() -> str:
    """Files and lines of each ring."""
    found: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for path in PACKAGE.rglob("*.py"):
        found[ring(path.relative_to(PACKAGE).as_posix())].append(len(path.read_text().splitlines()))
    return "\n".join(f"ring {number}: {len(lines)} files, {sum(lines)} lines" for number, lines in found.items())


def main() -> int:
    print(table(), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="core-alone-") as name:
        folder = Path(name)
        copy(folder)
        for fault in FAULTS:
            results = run(folder, fault, free_port())
            good = survives(fault, results)
            failed += not good
            print(f"{fault}: {'survived' if good else 'not survived'}", flush=True)
            if not good:
                for status, output in results:
                    print(f"--- status {status}\n{output}", flush=True)
    return min(failed, 1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
