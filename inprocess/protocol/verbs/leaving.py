"""Ranks that were asked to leave, as by a scheduler: whether all were, and what they agree on before they do.

A hint, not a decision: what ends an iteration, and who is in the next one, is decided as always.
"""

from __future__ import annotations

from inprocess.protocol.ops import Claim, Delete, Read, Verb
from inprocess.protocol.parsing import load_count
from inprocess.protocol.verbs.shared import count_in, read_count

__all__ = ["SAVED", "STEP", "WANTED", "forget_leaving", "heard", "say"]

#: a rank was asked to leave; how many steps it has committed since it knew that all were; its checkpoint is written
WANTED, STEP, SAVED = "leaving", "leaving_step", "leaving_saved"


def say(iteration: int, what: str, value: int = 0) -> Verb[None]:
    """Count this rank in. Each rank says each of these once in an iteration."""
    key = f"{iteration}/{what}"
    found = yield Read(key)
    while value > (0 if found is None else load_count(found, key)):
        before = "" if found is None else found.decode()
        found = yield Claim(key, str(value), instead=before, awaited=False)
    yield from count_in(f"{key}#", careful=True)


def heard(iteration: int, what: str) -> Verb[tuple[int, int]]:
    """How many ranks have said it, and the largest value among theirs."""
    key = f"{iteration}/{what}"
    count = yield from read_count(f"{key}#")
    return count, (yield from read_count(key))


def forget_leaving(iteration: int) -> Verb[None]:
    """Delete what was said in an iteration, which mostly is nothing."""
    if not (yield from read_count(f"{iteration}/{WANTED}#")):
        return
    for what in (WANTED, STEP, SAVED):
        yield Delete(f"{iteration}/{what}")
        yield Delete(f"{iteration}/{what}#")
