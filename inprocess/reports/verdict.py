"""Who failed, and how: from the evidence of one interruption. Pure rules, the most certain first."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inprocess.attribution import RETURNED, Interruption, InterruptionRecord, is_echo, is_error, ranges
from inprocess.protocol.phases import Phase
from inprocess.reports.evidence import Evidence, Witness

__all__ = ["CLASSES", "Verdict", "judge"]

#: class -> what it means
CLASSES = {
    "exception": "The function raised an exception.",
    "oom": "Out of memory: the exception says so, or the kernel ended a process of this cgroup.",
    "signal": "The process was ended by a signal.",
    "exit": "The process ended by itself.",
    "hang": "A rank made no progress in Python code, or in a library that lets other threads run.",
    "gil_hang": "A rank made no progress and held the interpreter lock: no other thread of it ran.",
    "stopped": "The process was stopped (SIGSTOP, a debugger, a frozen cgroup).",
    "collective": "All ranks waited for each other, and not in the same collective.",
    "input": "The input pipeline: a worker of a DataLoader died, or the rank waited for its data.",
    "host_lost": "Nothing was heard of the host, not even of its monitor.",
    "store_lost": "The store was lost.",
    "gpu": "A GPU failed, as CUDA, NCCL or a health check says.",
    "preemption": "A signal asked the rank to leave, as a scheduler's SIGTERM does.",
    "request": "No failure: a restart was asked for, or a process joined.",
}
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|^MemoryError|can't allocate memory|Cannot allocate memory|ENOMEM"
)
_GPU = re.compile(r"CUDA error|CUDNN_STATUS|cuBLAS|Xid|NVML|ncclUnhandledCudaError|uncorrectable ECC|HealthCheckError")
_LOADER = re.compile(r"DataLoader worker|DataLoader timed out")
_COLLECTIVE = re.compile(r"mismatch between|Detected mismatch|op\.preamble\.length|collective.*(mismatch|desync)")
#: of a rank whose host is still there when the store is lost
_LAST_WORDS = {"store_lost", "left", "died", "killed"}
#: of a rank that is still there when an iteration ends
_WORDS = {"raised", "interrupted", "stacks", *_LAST_WORDS}
_DATA = ("torch/utils/data/", "/inprocess/live/workers.py")
_IN_COLLECTIVE = ("torch/distributed/", "torch/nn/parallel/distributed.py")
_LIBRARY = ("/inprocess/call/", "/inprocess/interrupt/", "/inprocess/system/", "/inprocess/wrap.py")


@dataclass(frozen=True)
class Verdict:
    """Who failed.

    Attributes:
        initial_rank: the first rank that failed; None: nobody can be named.
        kind: a key of `CLASSES`.
        confidence: from 0 to 1: how often such a verdict is right, as an estimate.
        where: place in the program, such as ``loader.py:88 next_batch``; empty: not known.
        waiting: initial ranks that waited for others.
        also: other initial ranks that failed by themselves.
        message: what is known in words.
        evidence: what speaks for it, and `against`: what speaks against it or is missing.
    """

    initial_rank: int | None
    kind: str
    confidence: float
    where: str = ""
    waiting: tuple[int, ...] = ()
    also: tuple[int, ...] = ()
    message: str = ""
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Finding:
    """What one rule says of one rank; None: of nobody."""

    rank: int | None
    kind: str
    confidence: float
    where: str
    message: str
    evidence: tuple[str, ...]
    at: float


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one interruption."""
    for rule in _RULES:
        if found := rule(evidence):
            return _verdict(evidence, sorted(found, key=lambda finding: (finding.at, finding.rank or 0)))
    return Verdict(None, "exception", 0.1, message=evidence.why, against=("no event names a rank that failed",))


def _verdict(evidence: Evidence, found: Sequence[_Finding]) -> Verdict:
    first = found[0]
    failed = {finding.rank for finding in found if finding.rank is not None}
    waiting = tuple(
        rank for rank, witness in sorted(evidence.witnesses.items()) if rank not in failed and _waits(witness)
    )
    missing = [] if first.rank is not None else ["no event names the rank that failed"]
    missing += [
        f"no stack of rank {rank}" for rank, witness in sorted(evidence.witnesses.items()) if not witness.frames
    ]
    return Verdict(
        first.rank,
        first.kind,
        first.confidence,
        first.where,
        waiting,
        tuple(sorted(rank for rank in failed if rank != first.rank)),
        first.message,
        first.evidence,
        tuple(missing),
    )


# --- the rules ----------------------------------------------------------------------------------------------------


def _processes(evidence: Evidence) -> list[_Finding]:
    """Ranks that are gone, or were ended because they did not answer."""
    found = []
    for rank, witness in evidence.witnesses.items():
        for record in witness.records:
            finding = None
            if record.interruption is Interruption.HARD_TIMEOUT:
                finding = _silent(witness, record, evidence)
            elif record.interruption is Interruption.UNRESPONSIVE and witness.of("killed").get("at_once") is False:
                finding = _silent(witness, record, evidence)  # by its monitor, which ended with it
            elif record.interruption is Interruption.UNRESPONSIVE and not witness.has(Interruption.HARD_TIMEOUT):
                finding = _Finding(rank, "host_lost", 0.9, "", record.message, (str(record),), _at(witness, "died"))
            elif record.interruption is Interruption.TERMINATED and not witness.has(Interruption.HARD_TIMEOUT):
                finding = _dead(witness, record)
            elif record.interruption is Interruption.MONITOR_PROCESS_EXCEPTION:
                finding = _Finding(rank, "exit", 0.5, "", record.message, (str(record),), _at(witness, "died"))
            if finding is not None:
                found.append(finding)
                break
    return found


def _vanished(evidence: Evidence) -> list[_Finding]:
    """The store is lost with its host, which had ranks: nobody is left to say that they are gone."""
    lost = [witness for witness in evidence.witnesses.values() if "store_lost" in witness.events]
    if not lost:
        return []
    told = (str(lost[0].of("store_lost").get("text", "")), "the others went on without it, and nothing was heard of it")
    return [_Finding(rank, "host_lost", 0.85, "", evidence.why, told, 0.0) for rank in evidence.missing]


def _dead(witness: Witness, record: InterruptionRecord) -> _Finding:
    died = witness.of("died")
    how = record.message or str(died.get("how", ""))
    at = _at(witness, "died")
    if _count(died.get("oom_kills")) > 0 and died.get("signal") in (signal.SIGKILL, None):
        told = f"the kernel ended {_count(died.get('oom_kills'))} process(es) of this cgroup for its memory limit"
        return _Finding(witness.rank, "oom", 0.95, "", how, (how, told), at)
    if left := witness.of("left"):
        return _left(witness, str(left.get("why", "")), at)
    if how == "killed by SIGTERM":
        why = "that is how schedulers ask a process to leave; nothing else is known of who sent it"
        return _Finding(witness.rank, "preemption", 0.8, "", how, (how, why), at)
    if how.startswith("killed by"):
        return _Finding(witness.rank, "signal", 0.95, "", how, (how,), at)
    if "exited with code" in how:
        return _Finding(witness.rank, "exit", 0.95, "", how, (how,), at)
    unknown = "its exit status is not known: its parent had asked for it before its monitor could"
    return _Finding(witness.rank, "signal", 0.5, "", how, (how, unknown), at)


def _left(witness: Witness, why: str, at: float) -> _Finding:
    kind = "exit" if why.startswith("SystemExit") else _class_of(why)
    kind = "signal" if why.startswith("KeyboardInterrupt") else kind
    kind = "request" if why.startswith("RestartAbort") else kind
    return _Finding(witness.rank, kind, 0.9, "", why, (f"it left with {why}",), at)


def _silent(witness: Witness, record: InterruptionRecord, evidence: Evidence) -> _Finding:
    """A rank that was ended, since it did not answer."""
    at = _at(witness, "no_progress", "killed")
    state = str(witness.of("process").get("state", ""))
    stuck = next((each for each in evidence.stuck if each.initial_rank == witness.rank), None)
    where = _place(witness) or ("" if stuck is None else _short(stuck.where))
    told = (str(record), *((f"its process was in state {state}",) if state else ()))
    if state in ("T", "t"):
        return _Finding(witness.rank, "stopped", 0.95, where, record.message, told, at)
    if not witness.answered:
        told += ("none of its threads ran Python code after the interruption",)
        return _Finding(witness.rank, "gil_hang", 0.9, where, record.message, told, at)
    return _Finding(witness.rank, _hang_class(witness), 0.9, where, record.message, told, at)


def _raised(evidence: Evidence) -> list[_Finding]:
    """Ranks whose function raised, or that left by themselves."""
    found = []
    for record in evidence.records:
        rank = _rank_of(record)
        witness = evidence.witnesses[rank]
        at = _at(witness, "raised", "left")
        where, told = _short(record.where), (str(record),)
        if record.interruption is Interruption.EXCEPTION and not is_echo(record):
            lost_worker = "/multiprocessing/" in record.where and _is_in_data(
                map(str, witness.of("raised").get("lines", ()))
            )
            kind = "input" if lost_worker else _class_of(record.message)
            found.append(_Finding(rank, kind, 0.95, where, record.message, told, at))
        elif record.interruption is Interruption.PREEMPTED:
            why = "a signal asked it to leave, and it did after its step"
            found.append(_Finding(rank, "preemption", 1.0, "", record.message, (*told, why), at))
        elif record.interruption is Interruption.BASE_EXCEPTION:
            left = _left(witness, record.message, at)
            found.append(_Finding(rank, left.kind, left.confidence, where, record.message, told, at))
    # whoever sees another one fail says so a moment later, in words that need not be known here
    return found


def _echoes(evidence: Evidence) -> list[_Finding]:
    """All saw only another one's failure: of a rank that had returned, or of the one that said nothing."""
    seen = [record for record in evidence.records if record.interruption is Interruption.EXCEPTION]
    if not seen:
        return []
    told: tuple[str, ...] = (f"ranks {ranges(map(_rank_of, seen))} saw the failure of another one", str(seen[0]))
    for rank in _returned(evidence):
        early = (*told, f"rank {rank} had returned from the function, while they waited for it")
        return [_Finding(rank, "collective", 0.7, "", seen[0].message, early, 0.0)]
    silent = [rank for rank, w in evidence.witnesses.items() if not w.events.keys() & _WORDS]
    if len(silent) == 1:
        told += (f"nothing was heard of rank {silent[0]} since",)
        return [_Finding(silent[0], "exception", 0.4, "", seen[0].message, told, 0.0)]
    return [_Finding(None, "exception", 0.2, "", seen[0].message, told, 0.0)]


def _returned(evidence: Evidence) -> list[int]:
    """Ranks whose function had returned, the first first."""
    at: dict[int, float] = {}
    for entry in evidence.entries:
        if entry.kind == "phase" and entry.event.phase == Phase.FINISH.value and not entry.source.is_monitor:
            at.setdefault(entry.rank, entry.at)
    return sorted(at, key=lambda rank: at[rank])


def _standstill(evidence: Evidence) -> list[_Finding]:
    """Nobody made progress: those that did not wait for others."""
    if not any(record.interruption is Interruption.SOFT_TIMEOUT for record in evidence.records):
        return []
    if not evidence.stuck and any(map(is_error, evidence.records)):
        return []  # that explains it
    found = []
    for record in evidence.stuck:
        rank = _rank_of(record)
        witness = evidence.witnesses.get(rank, Witness(rank))
        where = _short(record.where) or _place(witness)
        at = _at(witness, "no_progress")
        told = (f"rank {rank} did not wait for others", *((f"it was at {where}",) if where else ()))
        if record.where == RETURNED:
            found.append(_Finding(rank, "collective", 0.8, "", "it had returned from the function", told, at))
        else:
            found.append(_Finding(rank, _hang_class(witness), 0.85, where, evidence.why, told, at))
    everybody = {rank for rank, witness in evidence.witnesses.items() if witness.frames}
    if found and not {finding.rank for finding in found} >= everybody:
        return found
    return _mismatch(evidence) or found or _quietest(evidence)


def _mismatch(evidence: Evidence) -> list[_Finding]:
    """All wait: those that wait elsewhere than most, or have come further than most."""
    places = {rank: _place(witness) for rank, witness in evidence.witnesses.items() if _place(witness)}
    pings = {rank: witness.pings for rank, witness in evidence.witnesses.items() if witness.pings is not None}
    for values, what in ((places, "waits at another place"), (pings, "has taken another number of steps")):
        counts = Counter(values.values()).most_common()
        if len(counts) < 2:
            continue
        usual, number = counts[0]
        odd = sorted(rank for rank, value in values.items() if value != usual)
        confidence = 0.85 if number > len(odd) else 0.5
        return [
            _Finding(rank, "collective", confidence, places.get(rank, ""), evidence.why, (f"rank {rank} {what}",), 0.0)
            for rank in odd
        ]
    return []


def _quietest(evidence: Evidence) -> list[_Finding]:
    """Nothing tells them apart: the rank that was silent for the longest time."""
    silent = {
        rank: each for rank, w in evidence.witnesses.items() if (each := _number(w.of("no_progress"), "silent_for"))
    }
    if not silent:
        return []
    rank = max(silent, key=lambda each: silent[each])
    witness = evidence.witnesses[rank]
    told = (f"it made no progress for {silent[rank]:.1f} s",)
    return [_Finding(rank, _hang_class(witness), 0.4, _place(witness), evidence.why, told, 0.0)]


def _others(evidence: Evidence) -> list[_Finding]:
    """What is no rank's fault."""
    found = []
    for record in evidence.records:
        rank = _rank_of(record)
        if record.interruption in (Interruption.REQUESTED, Interruption.JOINED):
            found.append(_Finding(rank, "request", 0.95, _short(record.where), record.message, (str(record),), 0.0))
    return found


def _store(evidence: Evidence) -> list[_Finding]:
    """Nobody failed and the store is gone: with the one rank of which nothing was heard afterwards, if there is one."""
    lost = {rank: w for rank, w in evidence.witnesses.items() if "store_lost" in w.events}
    if not lost:
        return []
    said = str(next(iter(lost.values())).of("store_lost").get("text", ""))
    told: tuple[str, ...] = (f"the store was lost on ranks {ranges(lost)}",)
    silent = [rank for rank, w in evidence.witnesses.items() if w.events and not w.events.keys() & _LAST_WORDS]
    if len(silent) == 1:
        told += (f"neither rank {silent[0]} nor its monitor said anything afterwards",)
        return [_Finding(silent[0], "store_lost", 0.8, "", said, told, 0.0)]
    return [_Finding(None, "store_lost", 0.8, "", said, told, 0.0)]


_RULES: tuple[Callable[[Evidence], list[_Finding]], ...] = (
    _processes,
    _vanished,
    _standstill,
    _raised,
    _others,
    _store,
    _echoes,
)


# --- what they share ----------------------------------------------------------------------------------------------


def _class_of(message: str) -> str:
    """Of an exception, by what it says."""
    kinds = (("oom", _OUT_OF_MEMORY), ("input", _LOADER), ("gpu", _GPU), ("collective", _COLLECTIVE))
    return next((kind for kind, pattern in kinds if pattern.search(message)), "exception")


def _hang_class(witness: Witness) -> str:
    return "input" if _is_in_data(witness.frames) else "hang"


def _is_in_data(frames: Iterable[str]) -> bool:
    return any(part in frame for frame in frames for part in _DATA)


def _waits(witness: Witness) -> bool:
    """Its main thread was in a collective, or in this library, which waits for the others; or a collective had raised
    there, since the rank that failed had closed its connections."""
    told = witness.of("stacks")
    if told.get("waits") is True or told.get("left_collective") is True:
        return True
    for frame in witness.frames:
        if any(part in frame for part in _IN_COLLECTIVE):
            return True
        if "site-packages" not in frame and "/lib/python" not in frame:
            return any(part in frame for part in _LIBRARY)
    return False


def _place(witness: Witness) -> str:
    """The innermost line of the program's own."""
    told = witness.of("stacks").get("where")
    if isinstance(told, str) and told:
        return _short(told)
    for frame in witness.frames:
        if not any(part in frame for part in ("site-packages", "/lib/python", "<frozen", "/inprocess/")):
            return _short(frame)
    return ""


def _rank_of(record: InterruptionRecord) -> int:
    return record.rank if record.initial_rank is None else record.initial_rank


def _short(where: str) -> str:
    """``loader.py:88 next_batch``: without the folder."""
    return where.rpartition("/")[2].replace(" in ", " ", 1) if where != RETURNED else ""


def _at(witness: Witness, *kinds: str) -> float:
    """When the first of these was seen; what was not seen sorts last."""
    return min((witness.events[kind].at for kind in kinds if kind in witness.events), default=float("inf"))


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _number(attributes: object, name: str) -> float:
    value = attributes.get(name) if isinstance(attributes, dict) else None
    return float(value) if isinstance(value, int | float) else 0.0
