"""What `inprocess.testing` knows without a process: places, faults, schedules, results, and the story."""

from __future__ import annotations

import functools
import json
import os
import pickle
import select
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest

from inprocess.exception import OptionError
from inprocess.testing import At, Exit, HostLoss, Kill, Raise, SlowDown, StoreLoss, forked_monitor, here, random_faults
from inprocess.testing import growth as growing
from inprocess.testing.coordinates import Point, When
from inprocess.testing.faults import Fault, Hang
from inprocess.testing.growth import Growth
from inprocess.testing.outcome import RankResult
from inprocess.testing.rank import Context
from inprocess.testing.result import Result, differences
from inprocess.testing.story import tell

# --- places


MEETS = [
    (At(1, step=3), Point(1, 0, pings=3, at_ping=True)),
    (At(1, step=3), Point(1, 7, pings=3, at_ping=True)),
    (At(1, step=3, iteration=1), Point(1, 1, pings=3, at_ping=True)),
    (At(1), Point(1, 0, pings=0, phase="run")),
    (At(1, phase="run"), Point(1, 0, pings=0, phase="run")),
    (At(1, phase="end round"), Point(1, 0, phase="end round")),
    (At(1, label="save"), Point(1, 0, pings=9, label="save")),
    (At(1, label="save", step=9), Point(1, 0, pings=9, label="save")),
    (At(1, file="*.pt"), Point(1, 0, pings=2, file="/there/last.pt")),
    (At(1, file="last.*", step=1), Point(1, 0, pings=2, file="last.pt")),
    (At(1, step=0, call=2), Point(1, 0, pings=0, at_ping=True, call=2)),
]
MISSES = [
    (At(1, step=3), Point(0, 0, pings=3, at_ping=True)),
    (At(1, step=3), Point(1, 0, pings=2, at_ping=True)),
    (At(1, step=3), Point(1, 0, pings=3, label="save")),
    (At(1, step=3, iteration=1), Point(1, 0, pings=3, at_ping=True)),
    (At(1), Point(1, 0, pings=0, at_ping=True)),
    (At(1), Point(1, 0, phase="initialize")),
    (At(1, label="save"), Point(1, 0, pings=0, label="load")),
    (At(1, label="save", step=9), Point(1, 0, pings=8, label="save")),
    (At(1, label="save", step=0), Point(1, 0, label="save")),
    (At(1, file="*.pt"), Point(1, 0, pings=2, file="/some.pt/last.tmp")),
    (At(1, file="*.pt"), Point(1, 0, pings=2, label="save")),
    (At(1, step=0, call=2), Point(1, 0, pings=0, at_ping=True, call=1)),
]


@pytest.mark.parametrize(("at", "point"), MEETS, ids=str)
def test_a_rank_is_there(at: At, point: Point) -> None:
    assert at.meets(point)


@pytest.mark.parametrize(("at", "point"), MISSES, ids=str)
def test_a_rank_is_elsewhere(at: At, point: Point) -> None:
    assert not at.meets(point)


WRONG = {
    "rank": ({"rank": -1}, "rank=-1 is not a number from 0 on"),
    "step": ({"rank": 0, "step": "3"}, "step='3' is not a number from 0 on"),
    "bool": ({"rank": True}, "rank=True is not a number from 0 on"),
    "phase": ({"rank": 0, "phase": "training"}, "phase='training' is none of 'join', 'assign ranks'"),
    "two": ({"rank": 0, "phase": "join", "label": "save"}, "give one of phase, label"),
    "step and phase": ({"rank": 0, "phase": "join", "step": 1}, "give one of phase, step"),
}


@pytest.mark.parametrize("name", WRONG)
def test_places_that_cannot_be(name: str) -> None:
    given, says = WRONG[name]
    with pytest.raises(OptionError) as refused:
        At(**given)
    assert says in str(refused.value)


def test_a_kind_of_hang_that_there_is_not() -> None:
    with pytest.raises(OptionError, match="kind='for ever' is none of 'sleep'"):
        Hang("for ever")


def test_faults_are_shown_as_they_are_written() -> None:
    assert [repr(fault) for fault in (Kill(), Exit(3), Raise(OSError, "full"), HostLoss(ranks=(1, 2)))] == [
        "Kill()",
        "Exit(code=3)",
        "Raise(kind=OSError, text='full')",
        "HostLoss(ranks=(1, 2))",
    ]
    assert repr(At(1, label="save", iteration=2)) == "At(rank=1, iteration=2, label='save')"


@pytest.mark.parametrize("fault", [Raise(OSError), Kill(when=When("enter", 2)), HostLoss((1,)), StoreLoss()], ids=repr)
def test_faults_travel(fault: Any) -> None:
    assert pickle.loads(pickle.dumps(fault)) == fault


def test_a_place_outside_tests_does_nothing() -> None:
    here("save", step=3)


# --- events


class _Pipe:
    """The end of a pipe, and what comes out at the other one."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()

    def fileno(self) -> int:
        return self.into

    def event(self) -> dict[str, Any]:
        line = os.read(self.out, 1 << 16)
        assert len(line) <= select.PIPE_BUF
        return dict(json.loads(line))


@pytest.fixture
def pipe() -> Iterator[_Pipe]:
    made = _Pipe()
    yield made
    os.close(made.out)
    os.close(made.into)


def context(pipe: _Pipe, faults: Mapping[At, Any] | None = None) -> Context:
    return Context(SimpleNamespace(rank=0, faults=faults or {}), pipe, pipe)  # type: ignore[arg-type]


def test_a_long_list_has_its_first_items(pipe: _Pipe) -> None:
    lines = [f"the list number {number}: 0, 1, 2 at the entries of the function" for number in range(200)]
    context(pipe).emit("grown", lines=lines)
    told = pipe.event()["lines"]
    assert told[:-1] == lines[: len(told) - 1] and told[-1] == f"and {201 - len(told)} more" and len(told) > 20


def test_long_texts_have_their_ends(pipe: _Pipe) -> None:
    context(pipe).emit("exception", message="\u00e9" * 3000 + "!", trace="\u00e9\n" * 3000 + "?", cause="", type="E")
    told = pipe.event()
    assert told["message"].endswith("\u00e9!") and told["trace"].endswith("\n?") and told["type"] == "E"


def test_a_fault_whose_wait_is_interrupted_has_not_struck(pipe: _Pipe) -> None:
    at, struck = At(0, step=1), []

    class Noted(Fault):
        def strike(self, context: Any) -> None:
            struck.append(context)

    def interrupted(when: When) -> None:
        raise KeyboardInterrupt

    made, there = context(pipe, {at: Noted(when=When("here", 1))}), Point(0, 0, pings=1, at_ping=True)
    made.wait_for = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.reach(there)
    made.wait_for = lambda when: None  # type: ignore[method-assign]
    assert made.reach(there) and struck == [made] and not made.reach(there)


# --- schedules


def test_the_same_seed_makes_the_same_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = random_faults(7, 5), random_faults(7, 5)
    assert first == again != random_faults(8, 5)
    assert capsys.readouterr().out.startswith("random_faults(seed=7, n=5, ranks=4, steps=10):\n  At(rank=")


def test_a_seed_is_printed_where_none_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    made = random_faults(n=4)
    seed = int(capsys.readouterr().out.partition("seed=")[2].partition(",")[0])
    assert random_faults(seed, 4) == made


@pytest.mark.parametrize("seed", range(50))
def test_somebody_is_left(seed: int) -> None:
    faults = random_faults(seed, 9, ranks=3, steps=4)
    assert len(faults) == 9 and len({at.rank for at, fault in faults.items() if fault.ends}) < 3
    dead: set[int] = set()
    for at, fault in faults.items():
        assert at.rank not in dead, "nobody strikes a rank that is gone"
        dead |= {at.rank} if fault.ends else set()


def test_where_only_gentle_faults_are_left_to_choose() -> None:
    faults = random_faults(1, 6, ranks=1, kinds=[Kill(), StoreLoss()])
    assert set(map(type, faults.values())) == {StoreLoss}


@pytest.mark.parametrize(
    "given", [{"n": 0}, {"ranks": 0}, {"steps": 0}, {"kinds": []}, {"kinds": [SlowDown()]}], ids=str
)
def test_schedules_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="random_faults: "):
        random_faults(1, **given)


# --- the monitor


def test_a_kernel_that_does_not_tell_where_the_command_line_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written at address zero."""
    monkeypatch.setattr(forked_monitor, "stat_fields", lambda pid: ["0"] * 50)
    forked_monitor._rename()


# --- what grows


def _grown(*counts: dict[str, int]) -> list[str]:
    growth = Growth()
    growth._counts = [Counter(count) for count in counts]
    return growth.lines()


def test_what_grows_at_each_entry() -> None:
    assert _grown({"x": 0}, {"x": 1}, {"x": 2}) == ["x: 0, 1, 2 at the entries of the function"]
    assert _grown({}, {"x": 1}, {"x": 3}) == ["x: 0, 1, 3 at the entries of the function"]


def test_what_is_made_once_does_not() -> None:
    assert _grown({"x": 0}, {"x": 1}, {"x": 1}) == []
    assert _grown({"x": 0}, {"x": 2}, {"x": 1}, {"x": 3}) == []


def test_two_entries_do_not_tell() -> None:
    assert _grown({"x": 0}, {"x": 1}) == []


SOURCE = """
NAMES, KINDS, DEPTH = [], {}, 0
class Registry:
    every = []
    def add(self, one):
        self.every.append(one)
def register(name):
    NAMES.append(name)
    NAMES += [name]
    KINDS[name] = 1
    KINDS.get(name)
    NAMES[0] = 2
    other = NAMES
"""


@pytest.mark.parametrize(
    ("name", "lines"),
    [("NAMES", [8, 9, 12]), ("KINDS", [10]), ("every", [6]), ("DEPTH", [])],
)
def test_the_line_that_makes_it_grow(name: str, lines: list[int], tmp_path: Any) -> None:
    module = ModuleType("some")
    module.__file__ = str(tmp_path / "some.py")
    (tmp_path / "some.py").write_text(SOURCE)
    found = list(growing._search(module, name, growing._enlarges))
    assert [int(line.split(":")[1].split()[0]) for line in found] == lines


def test_a_module_without_source_has_no_line(tmp_path: Any) -> None:
    module = ModuleType("some")
    module.__file__ = str(tmp_path / "gone.py")
    assert list(growing._search(module, "NAMES", growing._enlarges)) == []


class _AttrDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


class _Slots:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.fixture
def program(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the program."""
    made = ModuleType("program_of_test")
    made.__file__ = str(tmp_path / "program_of_test.py")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(_Slots, "__module__", made.__name__)
    monkeypatch.setattr(growing, "modules", lambda: iter([made]))
    return made


def _counted(times: int = 1) -> Growth:
    growth = Growth()
    for _ in range(times):
        growth.count()
    return growth


@pytest.mark.parametrize(
    "value", [_AttrDict(lr=0.1), _Slots(), call, MagicMock(), Mock()], ids=lambda value: type(value).__name__
)
def test_objects_that_answer_to_any_name_are_counted(program: ModuleType, value: Any) -> None:
    program.value = value  # type: ignore[attr-defined]
    assert not [name for name in _counted()._counts[0] if "cache" in name]


def test_results_in_a_cache_grow(program: ModuleType) -> None:
    program.caches = {"a": functools.lru_cache(abs)}  # type: ignore[attr-defined]
    growth = Growth()
    for number in range(3):
        growth.count()
        program.caches["a"](number)
    assert growth.lines() == [
        "results in the cache of program_of_test.caches['a']: 0, 1, 2 at the entries of the function"
    ]


def test_a_large_dict_is_counted_whole(program: ModuleType) -> None:
    """Its keys are not put into words."""

    class Key:
        def __repr__(self) -> str:
            raise AssertionError

    program.large = {key: [1] for key in range(growing.LARGE + 1)}  # type: ignore[attr-defined]
    program.small = {Key(): [1, 2]}  # type: ignore[attr-defined]
    counted = _counted()._counts[0]
    assert counted["the dict program_of_test.large"] == growing.LARGE + 1
    assert counted["the dict program_of_test.small"] == 3


def test_what_cannot_be_counted_is_no_error_of_the_program() -> None:
    """The test that asks for it is told."""

    pytest.importorskip("torch")
    from inprocess.testing.instruments import Instruments

    class Uncountable:
        groups = ()

        def count(self) -> None:
            raise KeyError("cache_info")

    told: list[tuple[str, str]] = []
    emit = lambda event, **fields: told.append((event, fields["error"]))  # noqa: E731
    instruments = SimpleNamespace(_growth=Uncountable(), _context=SimpleNamespace(emit=emit))
    Instruments._count(instruments)  # type: ignore[arg-type]
    assert told == [("uncounted", "KeyError: 'cache_info'")]
    event = {"event": "uncounted", "t": 0.1, "call": 0, "iteration": 0, "error": told[0][1]}
    with pytest.raises(AssertionError, match="could not be counted at each entry: KeyError: 'cache_info'"):
        result(rank(0, *(entry(n, 1) for n in range(3)), event)).assert_nothing_grows()


# --- results


def rank(number: int, *events: dict[str, Any], exitcode: int | None = 0, pid: int = 0, **more: Any) -> RankResult:
    given = {"value": None, "exception": None, "message": "", "trace": "", "leftovers": [], "log": ""} | more
    told = [{"event": "start", "t": 0.0, "call": -1, "iteration": None}, *events]
    return RankResult(number, pid or number + 100, exitcode, events=told, **given)


def entry(iteration: int, size: int, pid: int = 100, call: int = 0) -> dict[str, Any]:
    return {"event": "enter", "t": 0.1, "call": call, "iteration": iteration, "world_size": size, "pid": pid}


def result(*ranks: RankResult) -> Result:
    return Result(ranks, {"At(rank=1)": "Kill()"}, [], "story")


def test_world_sizes_are_those_of_each_iteration() -> None:
    done = result(rank(0, entry(0, 3), entry(1, 2), entry(0, 2, call=1)), rank(1, entry(0, 3), entry(2, 1)))
    assert done.world_sizes == [3, 2, 1, 2] and done.restarts == 2


def test_nobody_was_replaced() -> None:
    assert result(rank(0, entry(0, 1)), rank(1, entry(0, 2, pid=101))).same_pids
    assert not result(rank(0, entry(0, 1), entry(1, 1, pid=7))).same_pids
    assert not result(rank(0, entry(0, 1)), rank(0, pid=102)).same_pids
    assert not result(rank(0)).same_pids, "nobody has entered the function"


def test_values() -> None:
    assert result(rank(0, value=pickle.dumps([1])), rank(1)).values == [[1], None]
    with pytest.raises(AssertionError, match=r"rank 0 returned what cannot be pickled: generator \(cannot\)"):
        _ = result(rank(0, value="generator (cannot)")).values


def said(iteration: int, step: int) -> dict[str, Any]:
    return {"event": "here", "t": 0.2, "call": 0, "iteration": iteration, "label": "resume", "step": step}


def test_resumed_from() -> None:
    done = result(rank(0, entry(0, 2), entry(1, 2), said(0, 0), said(1, 5)), rank(1, entry(0, 2)))
    done.assert_resumed_from(5)
    with pytest.raises(AssertionError, match=r"rank 0 went on from step 5 in iteration 1, not from 6; faults: At\("):
        done.assert_resumed_from(6)
    with pytest.raises(AssertionError, match="there was no restart"):
        result(rank(0, entry(0, 2))).assert_resumed_from(0)
    with pytest.raises(AssertionError, match=r"did not say from which step .*here\(\"resume\", step=step\)"):
        result(rank(0, entry(0, 2), entry(1, 2))).assert_resumed_from(0)


def test_the_same_result() -> None:
    value = {"a": [1, 2.0], "b": (3,)}
    done, other = (result(rank(0, value=pickle.dumps(given))) for given in (value, {"a": [1, 2.5], "b": (3,)}))
    done.assert_same_result(value)
    done.assert_same_result(done)
    with pytest.raises(AssertionError, match=r"the value of rank 0\['a'\]\[1\] is 2.5, not 2.0"):
        other.assert_same_result(done)
    gone = result(rank(0, exitcode=-9), rank(1, value=pickle.dumps(1)))
    gone.assert_same_result(1)
    with pytest.raises(AssertionError, match="there is nothing to compare: no rank returned in both runs"):
        gone.assert_same_result(result(rank(0, value=pickle.dumps(1)), rank(1, exitcode=-9)))


def test_differences() -> None:
    assert list(differences({"a": 1}, {"b": 1}, "x")) == ["x['b'] is missing", "x['a'] is too much"]
    assert list(differences([1], [1, 2], "x")) == ["x is [1], not [1, 2]"]
    assert list(differences(float("nan"), float("nan"), "x")) == []
    assert list(differences(-0.0, 0.0, "x")) == ["x is -0.0, not 0.0"]
    assert list(differences(complex(0.0, -0.0), 0j, "x")) == ["x is -0j, not 0j"]
    assert list(differences([1], [True], "x")) == ["x[0] is 1 (int), not True (bool)"]
    assert list(differences([1], (1,), "x")) == ["x is [1] (list), not (1,) (tuple)"]


class _Table:
    """As one of pandas."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth of a table is ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def equals(self, other: _Table) -> bool:
        return self.rows == other.rows

    def __repr__(self) -> str:
        return f"Table{self.rows}"


def test_differences_of_what_has_no_truth() -> None:
    assert list(differences(_Table(1), _Table(1), "x")) == []
    assert list(differences(_Table(1), _Table(1, 2), "x")) == ["x is Table(1,), not Table(1, 2)"]


def test_differences_of_tensors() -> None:
    torch = pytest.importorskip("torch")
    zero, nan = torch.tensor([1.0, 0.0]), torch.tensor([[float("nan")]], dtype=torch.bfloat16)
    said = "x, torch.float32[2], differs in 1 of 2 elements; element 1 is -0.0, not 0.0"
    assert list(differences(torch.tensor([1.0, -0.0]), zero, "x")) == [said]
    assert list(differences(zero.numpy().astype(float), zero.numpy(), "x")) == ["x is float64[2], not float32[2]"]
    assert list(differences(-zero.numpy(), -zero.numpy(), "x")) == []
    assert len(list(differences((zero, zero), (zero,), "x"))) == 1
    for same in (nan, torch.zeros(0), torch.tensor(True), torch.tensor([1j]).conj()):
        assert list(differences(same, same.clone(), "x")) == []


def test_nothing_grows() -> None:
    three = [entry(n, 1) for n in range(3)]
    grown = {"event": "grown", "t": 0.3, "call": 0, "iteration": 2, "lines": ["the list a.B: 0, 1, 2"]}
    result(rank(0, *three)).assert_nothing_grows()
    with pytest.raises(AssertionError, match=r"the list a.B: 0, 1, 2 \(on ranks 0, 1\)"):
        result(rank(0, *three, grown), rank(1, *three, grown)).assert_nothing_grows()
    result(rank(0, *three, grown, entry(3, 1))).assert_nothing_grows()
    with pytest.raises(AssertionError, match="it takes two restarts to see what grows"):
        result(rank(0, *three[:2])).assert_nothing_grows()


# --- the story

STACKS = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "{package}monitor_thread.py", line 1 in run
  File "/lib/threading.py", line 2 in _bootstrap

Current thread 0x2 (most recent call first):
  File "/home/train.py", line 7 in train
  File "{package}testing/instruments.py", line 3 in _run
  File "{package}loop.py", line 4 in run

Extension modules: torch._C (total: 1)
"""


def test_the_story_in_order_and_nothing_twice() -> None:
    struck = {"event": "fault", "t": 1.5, "call": 0, "iteration": 0, "at": "At(rank=1)", "fault": "Kill()"}
    struck |= {"place": "iteration 0, the entry", "line": "train.py:3 in train"}
    phases = [
        {"event": "phase", "t": t, "call": 0, "iteration": 0, "name": name}
        for t, name in ((0.5, "run"), (2.0, "abort"))
    ]
    stacks = STACKS.format(package=growing.PACKAGE)
    told = tell(
        [
            rank(0, *phases, stacks=stacks, log="one\ntwo"),
            rank(1, struck, exitcode=-9, stacks=stacks.replace("0x", "0xf")),
        ],
        {"monitor0.log": "a INFO: routine\na WARNING: gone"},
        whole=False,
    )
    assert told.splitlines() == [
        "--- faults (times in seconds)",
        "     1.500  rank 1: Kill() in iteration 0, the entry [train.py:3 in train]",
        "--- phases (times in seconds)",
        "  rank 0 (initial rank; pid 100): exit code 0",
        "       0.000 start",
        "    iteration 0: run 0.500, abort 2.000",
        "  rank 1 (initial rank; pid 101): exit code -9",
        "       0.000 start",
        "--- stacks",
        "  ranks 0, 1:",
        "    Current thread  (most recent call first):",
        '      File "/home/train.py", line 7 in train',
        "--- last lines of the logs",
        "  rank 0:",
        "    one",
        "    two",
        "  monitor0.log:",
        "    a WARNING: gone",
    ]
