"""What the batch scripts of `examples/slurm` start: here without SLURM, which the tests of `nox -s slurm` have."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_says_when_it_is_done(command, tmp_path):
    done, folder = tmp_path / "done", tmp_path / "checkpoint.pt"
    variables = {"DONE": str(done), "CHECKPOINT": str(folder)}
    ranks = ("inprocess", "run", "--nproc-per-node", 2, ROOT / "examples/slurm/train.py")
    trained = command(*ranks, env=variables)
    assert trained.finish() == 0, trained.err
    assert done.exists() and trained.out.count("the weights are right to 0.0") == 2
    done.unlink()
    folder.write_text("no checkpoint")
    assert command(*ranks, env=variables).finish() != 0
    assert not done.exists()
