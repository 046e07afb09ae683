"""What a test may ask of a run."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import copysign
from typing import Any

from .growth import ENTRIES
from .outcome import RankResult

__all__ = ["Result", "differences"]


class Result:
    """How a run of a program on several ranks ended. All lists are by initial rank; processes that were started in
    place of others come behind them.

    Attributes:
        ranks: events, log and end of each process.
        faults: those that were asked for, as text: place -> fault.
        problems: one line for everything that is wrong whatever a test is about; empty, unless ``check=False``.
        story: all of it, for people.
    """

    def __init__(
        self, ranks: Sequence[RankResult], faults: Mapping[str, str], problems: Sequence[str], story: str
    ) -> None:
        self.ranks, self.faults, self.problems, self.story = list(ranks), dict(faults), list(problems), story

    def __repr__(self) -> str:
        return f"Result(world_sizes={self.world_sizes}, exit_codes={self.exit_codes})"

    @property
    def world_sizes(self) -> list[int]:
        """The world size of each iteration in which a rank entered the function; with several calls one after the
        other."""
        return [size for _, size in sorted(self._sizes().items())]

    @property
    def restarts(self) -> int:
        """How many of these iterations were not the first of their call."""
        return len(self._sizes()) - len({call for call, _ in self._sizes()})

    @property
    def same_pids(self) -> bool:
        """Every rank ran the function in the process in which it was started, no process was replaced, and it did
        run."""
        entries = [(result, event) for result in self.ranks for event in result.of("enter")]
        ranks = [result.rank for result in self.ranks]
        return bool(entries) and len(set(ranks)) == len(ranks) and all(e["pid"] == r.pid for r, e in entries)

    @property
    def exit_codes(self) -> list[int | None]:
        """As a shell would see them, but minus the number of the signal that ended a process."""
        return [result.exitcode for result in self.ranks]

    @property
    def values(self) -> list[Any]:
        """What the program returned on each rank; None where it did not return.

        Raises AssertionError for a value that cannot be pickled, with its type.
        """
        return [_loaded(result) for result in self.ranks]

    @property
    def exceptions(self) -> list[str | None]:
        """Type of the exception with which the program ended, by rank; None where it returned, or was killed."""
        return [result.exception for result in self.ranks]

    @property
    def struck(self) -> list[str]:
        """The places whose faults have struck."""
        return [event["at"] for result in self.ranks for event in result.of("fault")]

    def assert_resumed_from(self, step: int) -> None:
        """After the last restart every rank went on from this step.

        The step is the one that `LiveState.recover` returns, or that the program tells:
        ``inprocess.testing.here("resume", step=step)``, once in each run of the function.
        """
        __tracebackhide__ = True
        last = max(self._sizes(), default=(0, 0))
        if last[1] == 0:
            raise AssertionError(f"there was no restart{self._told()}")
        for result in self.ranks:
            if not result.of("enter", call=last[0], iteration=last[1]):
                continue
            steps = [event["step"] for event in result.of("here", call=last[0], iteration=last[1]) if "step" in event]
            if not steps:
                raise AssertionError(
                    f"rank {result.rank} did not say from which step it went on in iteration {last[1]}: use LiveState, "
                    'or write inprocess.testing.here("resume", step=step) where the step is known'
                )
            if steps[0] != step:
                where = f"rank {result.rank} went on from step {steps[0]} in iteration {last[1]}"
                raise AssertionError(f"{where}, not from {step}{self._told()}")

    def assert_same_result(self, reference: Result | Any) -> None:
        """What the ranks returned is the same, bit for bit, as in another run, or as this value.

        Args:
            reference: the result of a run without faults, say; every rank that returned in both is compared. Any other
                value is what every rank is to have returned.
        """
        __tracebackhide__ = True
        returned = {result.rank: _loaded(result) for result in self.ranks if result.has_returned}
        if isinstance(reference, Result):
            wanted = {result.rank: _loaded(result) for result in reference.ranks if result.has_returned}
        else:
            wanted = dict.fromkeys(returned, reference)
        if not returned.keys() & wanted:
            raise AssertionError(f"there is nothing to compare: no rank returned in both runs{self._told()}")
        for rank in sorted(returned.keys() & wanted):
            found = list(differences(returned[rank], wanted[rank], f"the value of rank {rank}"))
            if found:
                raise AssertionError("\n".join(found[:10]) + self._told())

    def assert_nothing_grows(self) -> None:
        """Nothing of these was more at each single entry of the function than at the one before: Python threads and
        open files of the same name, child processes, and containers in modules of the program.

        It takes two restarts on the same rank to tell that from what is made once. The failure has the line.
        """
        __tracebackhide__ = True
        if max((len(result.of("enter")) for result in self.ranks), default=0) < ENTRIES:
            raise AssertionError(
                f"it takes two restarts to see what grows, and none had them ({self.restarts} in this run): add faults"
            )
        if errors := {event["error"] for result in self.ranks for event in result.of("uncounted")}:
            raise AssertionError(f"what there is could not be counted at each entry: {'; '.join(sorted(errors))}")
        grown = {
            result.rank: result.of("grown")[-1]["lines"]
            for result in self.ranks
            if result.of("grown") and result.of("grown")[-1]["iteration"] == result.of("enter")[-1]["iteration"]
        }
        lines: dict[str, list[int]] = {}
        for rank, of_rank in grown.items():
            for line in of_rank:
                lines.setdefault(line, []).append(rank)
        if lines:
            told = [f"  {line} (on ranks {', '.join(map(str, ranks))})" for line, ranks in lines.items()]
            raise AssertionError("\n".join(["with each restart the program has more of this:", *told]))

    def _sizes(self) -> dict[tuple[int, int], int]:
        return {
            (event["call"], event["iteration"]): event["world_size"]
            for result in self.ranks
            for event in result.of("enter")
        }

    def _told(self) -> str:
        """Which faults there were, behind a failure."""
        return f"; faults: {', '.join(f'{at}: {fault}' for at, fault in self.faults.items()) or 'none'}"


def _loaded(result: RankResult) -> Any:
    value = result.value
    if isinstance(value, bytes):
        return pickle.loads(value)
    if isinstance(value, str):
        raise AssertionError(f"rank {result.rank} returned what cannot be pickled: {value}")
    return value


def differences(value: Any, wanted: Any, name: str) -> Iterator[str]:
    """One line for each leaf of nested dicts, lists and tuples in which two values are not the same, bit for bit."""
    if _is_array(value) and _is_array(wanted):
        yield from _arrays(value, wanted, name)
    elif type(value) is not type(wanted):
        what = (f"{each!r:.200} ({type(each).__name__})" for each in (value, wanted))
        yield f"{name} is {', not '.join(what)}"
    elif isinstance(value, Mapping):
        for key in [*wanted, *(key for key in value if key not in wanted)]:
            if key not in value or key not in wanted:
                yield f"{name}[{key!r}] is {'missing' if key not in value else 'too much'}"
            else:
                yield from differences(value[key], wanted[key], f"{name}[{key!r}]")
    elif isinstance(value, list | tuple) and len(value) == len(wanted):
        for index, pair in enumerate(zip(value, wanted, strict=True)):
            yield from differences(*pair, f"{name}[{index}]")
    elif not _same(value, wanted):
        yield f"{name} is {value!r:.200}, not {wanted!r:.200}"


def _same(value: Any, wanted: Any) -> bool:
    """Of two leaves of the same type. NaN is itself here."""
    if isinstance(value, complex):
        return _same(value.real, wanted.real) and _same(value.imag, wanted.imag)
    if isinstance(value, float):  # zero has a sign
        return (value == wanted and copysign(1, value) == copysign(1, wanted)) or (value != value and wanted != wanted)
    if isinstance(value, list | tuple) and len(value) != len(wanted):  # of tensors, say, which have no truth
        return False
    if hasattr(type(value), "equals"):  # a table of pandas or polars
        return bool(value.equals(wanted))
    try:
        return bool(value == wanted)
    except Exception:  # it compares each part of it
        return pickle.dumps(value) == pickle.dumps(wanted)


def _is_array(value: Any) -> bool:
    """A tensor of torch, or an array of NumPy."""
    return all(hasattr(type(value), name) for name in ("shape", "dtype", "reshape"))


def _arrays(value: Any, wanted: Any, name: str) -> Iterator[str]:
    if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        yield f"{name} is {value.dtype}{list(value.shape)}, not {wanted.dtype}{list(wanted.shape)}"
        return
    value, wanted = _plain(value), _plain(wanted)
    # a zero has a sign, NaN is itself here
    other = (_bytes(value) != _bytes(wanted)).any(-1) & ~((value != value) & (wanted != wanted)).reshape(-1)
    if count := int(other.sum()):
        first = other.tolist().index(True)
        pair = [each.reshape(-1)[first].item() for each in (value, wanted)]
        of = f"{value.dtype}{list(value.shape)}"
        yield f"{name}, {of}, differs in {count} of {len(other)} elements; element {first} is {pair[0]}, not {pair[1]}"


def _plain(array: Any) -> Any:
    """A tensor on the CPU that is neither sparse nor the conjugate of another one."""
    if not hasattr(array, "detach"):
        return array
    array = array.detach().cpu()
    return (array if str(array.layout) == "torch.strided" else array.to_dense()).resolve_conj().resolve_neg()


def _bytes(array: Any) -> Any:
    """A row for each element."""
    flat = array.reshape(-1)
    if hasattr(flat, "detach"):
        return flat.contiguous().view(sys.modules["torch"].uint8).reshape(len(flat), flat.element_size())
    size = 1 if flat.dtype.hasobject else flat.itemsize
    return (flat if flat.dtype.hasobject else flat.view("u1")).reshape(len(flat), size)
