"""The parts, made and compiled when this module is imported, as docs/after_the_restart.md advises.

A worker imports it before its call, so nobody waits for the compiler at a restart; a warm worker does so while it
waits (``--preload``). What torch traces of a plain module, forward and backward, is in its cache on disk; inside
DistributedDataParallel it is traced anew.
"""

from __future__ import annotations

from benchmarks.parts import Parts

__all__ = ["PARTS"]

PARTS = Parts()
PARTS.rehearse(PARTS.compiled)
