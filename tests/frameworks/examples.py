"""The examples for frameworks, as their first lines say: each meets a fault once and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "ranks", "last"),
    [
        ("accelerate_loop", 2, "the weights are right to 0.0"),
        ("transformers_trainer", 2, "loss 0."),
        ("lightning_fit", 2, "the weights are right to 0.0"),
        ("fsdp2_tp", 4, "loss 0."),
    ],
)
def test_example(command: Any, tmp_path: Path, name: str, ranks: int, last: str) -> None:
    example = EXAMPLES / f"{name}.py"
    arguments = ("--nproc-per-node", ranks, example, tmp_path / "checkpoints")
    launcher = command("inprocess", "run", *arguments, folder=tmp_path, deadline=300)
    assert launcher.finish() == 0
    assert launcher.out.count(last) == ranks
    assert "restart 1: rank 1 raised an exception: RuntimeError: a fault, once" in launcher.err
    assert len(example.read_text().splitlines()) <= 80
