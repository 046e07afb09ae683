"""The example of docs/getting_started.md: it stands there as it is, and prints what is said there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/minimal.py"
PAGE = (ROOT / "docs/getting_started.md").read_text()


def test_the_page_shows_the_example() -> None:
    text = EXAMPLE.read_text()
    assert f"```python\n{text[text.index('import os') :]}```" in PAGE


def test_it_prints_what_the_page_says(tmp_path: Path) -> None:
    """Also the second time, where nothing is left to do."""
    (sample,) = re.findall(r"prints\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    restart, *ends = [re.sub(r"\d+ ms|process \d+", "", line) for line in sample.splitlines()]
    command = [sys.executable, "-m", "inprocess", "run", "--nproc-per-node", "2", str(EXAMPLE)]
    for restarts in (1, 0):
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        # the launcher starts Python unbuffered: print() writes a line's end apart, and two lines may run together
        assert re.findall(r": the weights are right to \d\.\d+", done.stdout) == ends
        assert not re.sub(r"process \d+: the weights are right to \d\.\d+|\n", "", done.stdout)
        assert re.sub(r"\d+ ms", "", done.stderr).count(restart) == restarts, done.stderr
