"""The parts, made and compiled when this module is imported, as docs/after_the_restart.md advises.

A worker imports it before its call, so nobody waits for the compiler at a restart; a warm worker does so while it
waits (``--preload``). In a plain module torch keeps also what the backward pass was compiled to in its cache on disk;
inside DistributedDataParallel it does not.
"""

from __future__ import annotations

from benchmarks.parts import Parts, example

__all__ = ["PARTS"]

PARTS = Parts()
for _ in range(2):  # forward and backward, and what the second time finds otherwise
    PARTS.learn(PARTS.compiled, example())
PARTS.optimizer.zero_grad()
