"""`inprocess run`, also `python -m inprocess.run`: torchrun's command line, and workers that are replaced one by one.

    inprocess run --standalone --nproc-per-node 4 train.py --its-options

See docs/launcher.md. The code is in `inprocess.launcher`.
"""

from inprocess.launcher.program import main, program

__all__ = ["main", "program"]

if __name__ == "__main__":
    program()
