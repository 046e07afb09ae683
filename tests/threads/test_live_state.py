"""A LiveState in one process, without torch.distributed: what is kept, and what is given back."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import functools
import random
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inprocess import LiveState
from inprocess.exception import LiveStateError, OptionError, StateLost
from inprocess.live import patience, randoms, transfer, tree
from inprocess.live import state as live_state
from inprocess.live.beside import Beside
from inprocess.live.copies import Copies
from inprocess.live.every import Schedule
from inprocess.live.per_rank import RankParts
from inprocess.live.plan import DRAWN_BITS, NOTHING, WIDTH, Copy, Point, Shard
from inprocess.system import clock
from inprocess.system.progress import EVERY_S


def setup_module() -> None:
    """The first optimizer and the first backward of a process leave a variable and a thread."""
    model, optim = parts()
    model(torch.randn(5, 3)).sum().backward()
    optim.step()


class Part:
    """Holds anything."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Faulty(Exception):
    pass


ONE = Shard()


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(live: LiveState, model: torch.nn.Module, optim: torch.optim.Optimizer, to: int) -> None:
    while live.step < to:
        optim.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        with live.commit(live.step + 1):
            optim.step()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_begins_at_zero() -> None:
    live = LiveState(part=Part())
    assert (live.recover(), live.source) == (0, "nowhere")
    assert (live.recover(), live.source) == (0, "own memory")


def test_copies_of_a_future_that_did_not_come_to_be_are_dropped() -> None:
    """Another rank may have one of the same step, of what was done again."""
    copies = Copies()
    for step in (4, 6):
        copies.take(tree.take({"x": torch.zeros(2)}), Copy(ONE, step))
    copies.drop_after(Point(0, 4))
    assert [copy.step for copy in copies.held()] == [4]
    assert copies.next().held.step == NOTHING


def test_the_copies_that_all_ranks_have_are_not_the_next_to_be_overwritten() -> None:
    """Once: then there are newer ones."""
    copies = Copies()
    for step in (2, 4):
        copies.take(tree.take({"x": torch.zeros(2)}), Copy(ONE, step))
    copies.drop_after(Point(0, 4), spared=Point(0, 2))
    for step in (6, 8):
        copies.take(tree.take({"x": torch.zeros(2)}), Copy(ONE, step))
        assert sorted(copy.step for copy in copies.held()) == [{6: 2, 8: 6}[step], step]


def test_copies_of_another_history_are_overwritten_first_and_dropped_when_newer() -> None:
    """Whatever their step is: a rank that was in reserve has gone further in a history that did not come to be."""
    copies = Copies()
    for point in (Point(1, 6), Point(2, 4)):
        copies.take(tree.take({"x": torch.zeros(2)}), Copy(ONE, point.step, point.history))
    assert copies.next().held.point == Point(1, 6)
    assert copies.find(Copy(ONE, 4, 1)) is None
    copies.drop_after(Point(2, 4))
    assert [copy.point for copy in copies.held()] == [Point(2, 4)]
    copies.drop_after(Point(1, 4))
    assert not list(copies.held())


class Event:
    """Of a copy from a device."""

    def __init__(self, error: bool = False) -> None:
        self.error, self.waited = error, 0

    def synchronize(self) -> None:
        self.waited += 1
        if self.error:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize("error", [False, True])
def test_a_copy_that_is_under_way_counts_when_it_is_there(error: bool) -> None:
    copies, event = Copies(), Event(error)
    copies.buffers[0].holds_after([event], Copy(ONE, 4))
    assert copies.buffers[0].held.step == NOTHING
    assert [copy.step for copy in copies.held()] == ([] if error else [4])
    copies.settle()
    assert event.waited == 1


def test_a_long_transfer_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    caplog.set_level("INFO", "inprocess.live")
    shown = transfer.Shown("the state of step 7 from rank 3", 4 * 10**9)
    for _ in range(4):
        now += 0.625 * EVERY_S
        shown.more(10**9)
    assert [record.message for record in caplog.records] == [
        "the state of step 7 from rank 3: 2.0 of 4.0 GB, 0.16 GB/s",
        "the state of step 7 from rank 3: 4.0 of 4.0 GB, 0.16 GB/s",
    ]


def test_every_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank's steps count; so all ranks come to the same step."""
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    every = Schedule("copy_every", datetime.timedelta(seconds=10))
    every.begin(7)
    due = []
    for step in range(8, 200):
        now += 0.25
        if every.is_due(step):
            due.append(step)
            every.done(step, lambda mine: [list(mine), [500_000]])  # another rank takes 0.5 s
    assert due == list(range(9, 200, 20))


def test_every_so_many_steps() -> None:
    every = Schedule("copy_every", 3)
    every.begin(7)
    assert [step for step in range(8, 20) if every.is_due(step)] == [9, 12, 15, 18]
    assert not Schedule("copy_every", 0)
    assert not Schedule("copy_every", 0).is_due(6)


@pytest.mark.parametrize("value", [-1, True, 2.5, "10", datetime.timedelta(0), datetime.timedelta(seconds=-1)])
def test_no_number_of_steps(value: Any) -> None:
    with pytest.raises(OptionError, match="copy_every="):
        LiveState(copy_every=value)


def test_goes_on_where_it_was() -> None:
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    live.recover()
    train(live, model, optim, 3)
    before = values(model)
    model(torch.randn(5, 3))  # BatchNorm's averages are those of a step that is not committed
    assert not same(values(model), before)
    assert live.recover() == 3
    assert same(values(model), before)


def test_parts_that_are_made_anew() -> None:
    model, optim = parts()
    live = LiveState()
    live.recover(model=model, optim=optim)
    train(live, model, optim, 3)
    again, optim_again = parts()
    assert live.recover(model=again, optim=optim_again) == 3
    assert same(values(again), values(model))
    train(live, again, optim_again, 5)
    assert again[0].weight is not model[0].weight


def test_random_numbers_are_those_of_the_step() -> None:
    live = LiveState(part=Part(), seed=3)
    live.recover()
    with live.commit(1):
        pass
    drawn = torch.rand(2), random.random()
    live.recover()
    assert torch.equal(torch.rand(2), drawn[0])
    assert random.random() == drawn[1]


def test_what_a_loader_draws_changes_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not that of the GPU."""
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    before = [torch.default_generator.get_state(), gpu.get_state()]
    with randoms.kept():
        randoms.use(3)
        assert gpu.initial_seed() == 1
    assert same(before, [torch.default_generator.get_state(), gpu.get_state()])


def test_random_numbers_of_a_step_that_is_gone_back_to() -> None:
    live = LiveState(part=Part(), seed=3)
    live.recover()
    with live.commit(7):
        pass
    drawn = torch.rand(2)
    live.reseed(7)
    assert torch.equal(torch.rand(2), drawn)


def test_random_numbers_are_left_alone() -> None:
    torch.manual_seed(1)
    first = torch.rand(1)
    torch.manual_seed(1)
    live = LiveState(part=Part(), seed=None)
    live.recover()
    live.reseed(3)
    assert torch.equal(torch.rand(1), first)


def test_no_two_ranks_or_steps_draw_the_same() -> None:
    drawn = {randoms.derive_seed(base, step, rank) for base in range(5) for step in range(50) for rank in range(50)}
    assert len(drawn) == 5 * 50 * 50


def test_a_fault_inside_leaves_a_torn_state() -> None:
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    live.recover()
    train(live, model, optim, 2)
    with pytest.raises(Faulty), live.commit(3):
        raise Faulty
    assert live.step == NOTHING
    with pytest.raises(LiveStateError, match="an earlier commit failed"):
        live.commit(4)
    with pytest.raises(StateLost, match="copy_every"):
        live.recover()


def test_a_fault_in_the_first_step() -> None:
    """Copies were due later. An interruption before it, and a restart, change nothing."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=10)
    begin = values(model)
    for source in ("nowhere", "own memory", "own copy"):
        assert (live.recover(), live.source) == (0, source)
        assert same(values(model), begin)
        if source != "nowhere":
            model(torch.randn(5, 3)).sum().backward()
            with pytest.raises(Faulty), live.commit(1):
                optim.step()
                raise Faulty
    live.recover()
    train(live, model, optim, 2)
    assert live.step == 2


@pytest.mark.parametrize("again", [("optim",), ("model", "optim")])
def test_trained_parts_that_are_given_to_recover_again_are_no_beginning(again: tuple[str, ...]) -> None:
    """Torn in the middle of a step, they would be trained from step 0 on, in silence."""
    model, optim = parts()
    found = {"model": model, "optim": optim}
    given = {name: found[name] for name in again}
    live = LiveState(**{name: part for name, part in found.items() if name not in given})
    live.recover(**given)
    train(live, model, optim, 2)
    with pytest.raises(Faulty), live.commit(3):
        raise Faulty
    with pytest.raises(StateLost):
        live.recover(**given)
    live.forget()
    assert (live.recover(**given), live.source) == (0, "nowhere")


def test_where_nothing_was_committed_all_begin_again() -> None:
    """However often they have begun: a program may write its weights before the first commit."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    for _ in range(3):
        assert live.recover() == 0
    with torch.no_grad():
        model[0].weight += 1
    assert (live.recover(), live.source) == (0, "nowhere")


def test_cut_off_at_the_end_of_recover_where_one_part_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that stays was loaded with its own values."""
    model, optim = parts()
    live = LiveState(model=model)
    live.recover(optim=optim)
    train(live, model, optim, 2)
    monkeypatch.setattr(live, "_now_at", fail)
    with pytest.raises(Faulty):
        live.recover(optim=torch.optim.AdamW(model.parameters()))
    monkeypatch.undo()
    assert (live.recover(optim=torch.optim.AdamW(model.parameters())), live.source) == (2, "own memory")


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(("theirs", "value"), [(0, "due"), (1, "noted"), (2, "done"), (3, "done")])
def test_all_go_on_after_the_same_refresh(monkeypatch: pytest.MonkeyPatch, theirs: int, value: str, anew: bool) -> None:
    """One rank has done what was due after the step, and another one was interrupted before."""
    (model, optim), part = parts(), Part("due")
    live = LiveState(model=model, optim=optim) if anew else LiveState(model=model, optim=optim, part=part)
    live.recover(**({"part": part} if anew else {}))
    train(live, model, optim, 2)
    for part.value in ("noted", "done"):
        live.refresh()

    def gather(wire: Any, row: list[int]) -> list[list[int]]:
        if len(row) < WIDTH:  # digests
            return [row, row]
        return [row, [*row[: WIDTH + 2], theirs, *row[WIDTH + 3 :]]]

    monkeypatch.setattr(live_state, "gather", gather)
    for _ in range(2):  # whoever is cut off before the end of the first counts on
        part = Part("new") if anew else part
        assert live.recover(**({"part": part} if anew else {})) == 2
        assert part.value == value
        assert live._present.refreshes == min(2, theirs)
    live.refresh()
    live.refresh()
    assert live.recover(**({"part": part} if anew else {})) == 2
    assert part.value == value


def test_what_the_program_has_put_there_is_of_no_known_step() -> None:
    """A checkpoint of its own: taken for step 0, the training would begin at the front with trained weights."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=10)
    live.recover()
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(Faulty), live.commit(5001):
        raise Faulty
    with pytest.raises(StateLost):
        live.recover()


def test_the_step_is_known_before_there_are_parts() -> None:
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    assert live.peek() is None
    live.recover()
    train(live, model, optim, 2)
    assert (live.peek(), live.step) == (2, 2)
    with torch.no_grad():
        model[0].weight += 1
    assert (live.peek(), live.step) == (None, 2)  # it is for recover() to tear it


def test_a_trainer_wraps_the_model_before_it_recovers() -> None:
    """DistributedDataParallel writes the values that are there already. The optimizer's state would be lost, too."""
    model, optim = parts()
    live = LiveState()
    live.recover(model=model, optim=optim)
    train(live, model, optim, 2)
    assert live.peek() == 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())
    again = torch.optim.AdamW(model.parameters())
    assert (live.recover(model=model, optim=again), live.source) == (2, "own memory")
    assert again.state_dict()["state"][0]["step"] == 2
    assert live.peek() == 2
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(StateLost):
        live.recover(model=model, optim=again)


def test_forgotten() -> None:
    """A program that has its own checkpoint begins with that, where nothing in memory is whole."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=1)
    live.recover()
    train(live, model, optim, 2)
    live.forget()
    assert live.peek() is None
    assert (live.recover(), live.source) == (0, "nowhere")


def test_a_history_begins_with_the_first_new_step_after_recover() -> None:
    """Until then the state is that of the ones that were not there, or were cut off in the same `recover`."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=1)
    live.recover()
    found = [live._present.history]
    for step in (0, 2, 2):
        assert live.recover() == step
        found.append(live._present.history)
        with live.commit(step):  # nothing new
            pass
        found.append(live._present.history)
        train(live, model, optim, 2)
    first, second = found[0], found[3]
    assert found == [first, first, first, second, second, second, second]
    assert first < second
    assert {copy.history for copy in live._saving.copies.held()} == {second}


def test_restarts_in_reserve_count_and_another_call_begins_at_0_again() -> None:
    live, numbers = LiveState(part=Part()), []
    for last in (-1, -1, -4, 7):  # the iteration of the last `recover`; this one is in iteration 0
        live._iteration = last
        live.recover()
        numbers.append(live._history >> DRAWN_BITS)
    assert numbers == [1, 2, 6, 7]


def test_what_is_done_after_a_commit_is_kept() -> None:
    part, (model, optim) = Part("before"), parts()
    live = LiveState(model=model, optim=optim, part=part)
    live.refresh()  # nothing: there is no step
    live.recover()
    train(live, model, optim, 2)
    part.value = "after"
    live.refresh()
    part.value = "lost"
    assert (live.recover(), part.value) == (2, "after")


def test_changed_parameters_are_not_kept() -> None:
    """Such as weights that are exchanged for an evaluation: they are not those of the step."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    live.recover()
    train(live, model, optim, 2)
    with torch.no_grad():
        model[0].weight += 1
    live.refresh()
    with pytest.raises(StateLost):
        live.recover()


def test_a_copy_is_gone_back_to() -> None:
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=2)
    live.recover()
    train(live, model, optim, 4)
    before, random_numbers = values(model), torch.get_rng_state()
    train(live, model, optim, 5)
    with pytest.raises(Faulty), live.commit(6):
        optim.step()
        raise Faulty
    assert (live.recover(), live.source) == (4, "own copy")
    assert same(values(model), before)
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_a_copy_that_was_under_way_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before does."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=1)
    live.recover()
    train(live, model, optim, 3)
    real = torch.Tensor.copy_
    calls = iter(range(100))

    def copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dim() == 2 and next(calls) == 1:
            raise Faulty
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(Faulty):
        train(live, model, optim, 4)
    monkeypatch.undo()
    with pytest.raises(Faulty), live.commit(5):
        raise Faulty
    assert (live.recover(), live.source) == (3, "own copy")


def test_changed_behind_its_back() -> None:
    """As by a DistributedDataParallel that is made before recover."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    live.recover()
    train(live, model, optim, 2)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(StateLost, match="DistributedDataParallel"):
        live.recover()


def test_the_same_values_are_no_change() -> None:
    """As by a DistributedDataParallel that is made after recover, in the first step and in that after a restart."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    for step in (0, 2):
        assert live.recover() == step
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.clone())
        assert live.recover() == step
        assert live.source == "own memory"
        train(live, model, optim, 2)


def test_a_change_before_the_first_commit_is_a_beginning(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0's weights, which the constructor of DistributedDataParallel gives to all: no training is lost."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    live.recover()
    with torch.no_grad():
        model[0].weight += 1
    assert (live.recover(), live.source) == (0, "nowhere")
    assert not caplog.records
    train(live, model, optim, 1)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(StateLost):
        live.recover()


def test_gradients_of_an_interrupted_step_are_cleared() -> None:
    model, optim = parts()
    other = torch.nn.Parameter(torch.ones(2))
    optim.add_param_group({"params": [other]})
    live = LiveState(model=model, optim=optim)
    live.recover()
    (model(torch.randn(5, 3)).sum() + other.sum()).backward()
    live.recover()
    assert [parameter.grad for parameter in (*model.parameters(), other)] == [None] * 5


def test_a_learning_rate_is_that_of_the_commit() -> None:
    """Its scheduler, which is a part, goes back as well; also in what another rank gets."""
    model, optim = parts()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
    live = LiveState(model=model, optim=optim, schedule=schedule)
    live.recover()
    train(live, model, optim, 2)
    schedule.step()
    assert optim.param_groups[0]["lr"] == 0.05
    assert live._present.record().tree["optim"]["param_groups"][0]["lr"] == 0.1
    live.recover()
    assert (optim.param_groups[0]["lr"], schedule.last_epoch) == (0.1, 0)


def test_a_scaler_between_unscale_and_step() -> None:
    """It is at that stage outside its state_dict()."""
    model, optim = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    live = LiveState(model=model, optim=optim, scaler=scaler)
    live.recover()
    for step in (1, 2):
        scaler.scale(model(torch.randn(5, 3)).sum()).backward()
        scaler.unscale_(optim)
        assert live.recover() == step - 1
        scaler.scale(model(torch.randn(5, 3)).sum()).backward()
        scaler.unscale_(optim)
        with live.commit(step):
            scaler.step(optim)
            scaler.update()


def test_a_part_of_this_rank_alone() -> None:
    """It is given back at the same step and place; in no copy, and not gone back to with one."""
    own, (model, optim) = Part(1), parts()
    live = LiveState(model=model, optim=optim, own=own, per_rank="own", copy_every=2)
    live.recover()
    for value in (2, 3):
        own.value = value
        train(live, model, optim, value - 1)
    own.value = 4
    assert (live.recover(), own.value) == (2, 3)
    assert "own" not in live._present.record().tree
    own.value = 5
    train(live, model, optim, 3)
    own.value = 6
    with pytest.raises(Faulty), live.commit(4):
        raise Faulty
    assert (live.recover(), own.value) == (2, 6)


@pytest.mark.parametrize(
    ("step", "place", "value"),
    [
        (2, (1, 3), "kept"),
        (3, (1, 3), "now"),  # the others had its gradients
        (1, (1, 3), "now"),
        (2, (0, 3), "now"),
        (2, (1, 2), "now"),
    ],
)
def test_whose_a_part_of_a_rank_is(
    caplog: pytest.LogCaptureFixture, step: int, place: tuple[int, int], value: str
) -> None:
    """It was at step 2 as rank 1 of 3. A warning where nobody knows what it would be."""
    part, own = Part("first"), RankParts(["own"])
    own.split({"own": part})
    own.recover(Point(0, 0), (1, 3))
    part.value = "kept"
    own.at(Point(0, 2))
    part.value = "now"
    own.recover(Point(0, step), place)
    assert part.value == value
    assert bool(caplog.records) == (value == "now" and step < 3)


def test_a_part_of_a_rank_that_goes_back_to_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    """The first steps are done again, with a copy of the beginning: the part is where it has come to."""
    (model, optim), own = parts(), Part("first")
    live = LiveState(model=model, optim=optim, own=own, per_rank="own", copy_every=10)
    live.recover()
    own.value = "of step 2"
    train(live, model, optim, 2)
    for _ in range(2):
        with pytest.raises(Faulty), live.commit(3):
            raise Faulty
        caplog.clear()
        assert (live.recover(), live.source) == (0, "own copy")
        assert [each.args for each in caplog.records if "not known here" in each.message]
        own.value = "set"
    train(live, model, optim, 1)
    own.value = "later"
    caplog.clear()
    assert (live.recover(), own.value) == (1, "set") and not caplog.records


def test_a_part_of_another_rank_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """Made anew for the new place, it is no part of the old one."""
    own, new = RankParts(["own"]), Part("rank 0 of 2")
    own.split({"own": Part("rank 1 of 3")})
    own.recover(Point(0, 0), (1, 3))
    own.split({"own": new})
    own.recover(Point(0, 0), (0, 2))
    assert new.value == "rank 0 of 2" and len(caplog.records) == 1


def test_a_part_of_a_rank_that_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    (model, optim), new = parts(), Part("new")
    live = LiveState(model=model, optim=optim, per_rank=("own",))
    live.recover(own=Part("old"))
    train(live, model, optim, 2)
    live.forget()
    assert (live.recover(own=new), new.value) == (0, "new")
    assert not [each for each in caplog.records if "not known here" in each.message]


@pytest.mark.parametrize(("iteration", "is_warned"), [(0, False), (1, True)])
def test_a_part_of_a_rank_in_another_call(caplog: pytest.LogCaptureFixture, iteration: int, is_warned: bool) -> None:
    """Its iterations begin at 0 again: who comes into it later was in reserve."""
    part, own = Part(), RankParts(["own"])
    own.split({"own": part})
    own.enter(1)
    own.recover(Point(0, 0), (1, 2))
    own.at(Point(0, 2))
    own.begin_call()
    own.enter(iteration)
    own.recover(Point(1, 3), (1, 2))
    assert bool(caplog.records) == is_warned


@pytest.mark.parametrize(
    ("iteration", "step", "history", "value"),
    [(1, 3, 0, "kept"), (2, 3, 1, "warned"), (2, 2, 0, "back"), (2, 2, 1, "warned")],
)
def test_a_rank_that_was_in_reserve_meanwhile(
    caplog: pytest.LogCaptureFixture, iteration: int, step: int, history: int, value: str
) -> None:
    """What the others did without it moved no part of its own; they may have done its last step again."""
    part, own = Part("back"), RankParts(["own"])
    own.split({"own": part})
    own.enter(0)
    own.recover(Point(0, 0), (1, 3))
    own.at(Point(0, 2))
    part.value = "kept"
    own.enter(iteration)
    own.recover(Point(history, step), (1, 3))
    assert ("warned" if caplog.records else part.value) == value
    own.at(Point(0, step))
    own.enter(iteration + 1)  # from then on it takes part again
    own.recover(Point(0, step + 1), (1, 3))
    assert len(caplog.records) == (value == "warned")


def test_a_part_that_the_program_sets_is_known_with_the_next_commit(caplog: pytest.LogCaptureFixture) -> None:
    """Not what it was before: a fault right after a recovery is followed by a second one to the same step."""
    part, own = Part("of another place"), RankParts(["own"])
    own.split({"own": part})
    own.recover(Point(0, 0), (0, 2))
    for _ in range(2):
        own.recover(Point(0, 5), (1, 2))
        part.value = "set"
    own.recover(Point(0, 5), (1, 2))
    assert part.value == "set" and len(caplog.records) == 3
    own.at(Point(0, 6))
    part.value = "later"
    own.recover(Point(0, 6), (1, 2))
    assert part.value == "set" and len(caplog.records) == 3


def test_a_part_of_this_rank_that_is_made_anew() -> None:
    (model, optim), old, new = parts(), Part(1), Part(7)
    live = LiveState(model=model, optim=optim, per_rank=("own",))
    with pytest.raises(OptionError, match="per_rank='own' is no part"):
        live.recover()
    live.recover(own=old)
    train(live, model, optim, 1)
    old.value = 2
    assert (live.recover(own=new), new.value) == (1, 1)
    with pytest.raises(OptionError, match="per_rank='model' is a Sequential"):
        LiveState(model=model, per_rank=("model",))
    with pytest.raises(OptionError, match="must have state_dict"):
        LiveState(own=3, per_rank=("own",))


def test_a_digest_is_of_the_content() -> None:
    """Equal where the objects are others; of an object that is none of the plain kinds the type counts."""
    one: dict[str, Any] = {"a": [1, 2.5, None], "b": torch.ones(3), "c": (b"x", Part())}
    assert transfer.digest(one) == transfer.digest({"a": [1, 2.5, None], "b": torch.ones(3), "c": (b"x", Part(8))})
    others = ({"a": [1, 2.5, 0]}, {"a": [1, 2.5]}, {"b": torch.zeros(3)}, {"b": torch.ones(3, dtype=torch.int32)})
    digests = {transfer.digest(one | other) for other in others}
    assert len(digests | {transfer.digest(one)}) == 5


def test_changed_and_committed() -> None:
    model, optim = parts()
    live = LiveState(model=model, optim=optim)
    live.recover()
    train(live, model, optim, 2)
    with torch.no_grad(), live.commit(2):
        model[0].weight += 1
    assert live.recover() == 2


def test_cut_off_in_recover_before_anything_was_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that were there count yet, not the new ones."""
    model, optim = parts()
    live = LiveState()
    live.recover(model=model, optim=optim)
    train(live, model, optim, 2)
    again, optim_again = parts()
    monkeypatch.setattr(live_state, "plan", fail)
    with pytest.raises(Faulty):
        live.recover(model=again, optim=optim_again)
    monkeypatch.undo()
    last, optim_last = parts()
    assert (live.recover(model=last, optim=optim_last), live.source) == (2, "own memory")
    assert same(values(last), values(model))


def test_cut_off_in_recover_while_a_copy_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in place is torn then, whatever it was before."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, copy_every=1)
    live.recover()
    train(live, model, optim, 2)
    before = values(model)
    with pytest.raises(Faulty), live.commit(3):
        raise Faulty
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", fail)
    with pytest.raises(Faulty):
        live.recover()
    monkeypatch.undo()
    assert (live.recover(), live.source) == (2, "own copy")
    assert same(values(model), before)


def fail(*args: Any) -> None:
    raise Faulty


def test_steps_go_up() -> None:
    live = LiveState(part=Part())
    live.recover()
    with live.commit(1):
        pass
    with pytest.raises(OptionError, match="at step 1 already"):
        live.commit(0)


def test_commit_before_recover() -> None:
    with pytest.raises(LiveStateError, match="recover\\(\\) has not been called"):
        LiveState(part=Part()).commit(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"copy_every": -1}, "copy_every=-1"),
        ({"copy_every": 1, "replica_distance": -2}, "replica_distance=-2"),
        ({"replica_distance": 1}, "needs copy_every"),
        ({"model": object()}, "model=.* must have state_dict"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        LiveState(**options)


# --- the parts of it ----------------------------------------------------------------------------------------------


def test_header_and_data() -> None:
    state = {"a": [torch.arange(6).view(2, 3), 1.5, None], "b": {"c": torch.tensor(2.0, dtype=torch.bfloat16), 7: "x"}}
    record = tree.take(state)
    skeleton = tree.read(record.header())
    target = tree.into({}, skeleton)
    for room, data in zip(target.tensors, record.tensors, strict=True):
        room.copy_(data)
    assert torch.equal(target.tree["a"][0], state["a"][0])
    assert (target.tree["a"][1:], target.tree["b"][7]) == ([1.5, None], "x")
    assert target.tree["b"]["c"].dtype is torch.bfloat16


def test_own_tensors_are_filled() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(2)}
    target = tree.into(state, tree.take({"a": torch.ones(3), "b": torch.ones(4)}).tree)
    assert target.tree["a"] is state["a"]
    assert target.tree["b"].shape == (4,)


def with_versions(versions: Any) -> Any:
    """As a module's state_dict() has them."""
    state: Any = collections.OrderedDict(weight=torch.ones(1))
    state._metadata = versions
    return state


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"rates": [0.5, np.float64(0.1)]}, ("value.rates.1", "numpy.float64")),
        ((datetime.timedelta(1),), ("value.0", "datetime.timedelta")),
        (Kind.ONE, ("value", f"{__name__}.Kind")),
        ({Kind.ONE: 1}, ("value", "dict with such keys")),
        (threading.Lock(), ("value", "_thread.lock")),
        ({"a": 1, 2: (None, True, 1j, b"x", torch.float32, torch.ones(2), torch.Size([1]))}, None),
        (collections.Counter("aab"), None),
        (with_versions({"": {"version": 2}}), None),
        (with_versions({"": {"version": datetime.timedelta(1)}}), ("value._metadata..version", "datetime.timedelta")),
    ],
)
def test_what_cannot_be_sent_is_found(value: Any, expected: tuple[str, str] | None) -> None:
    found = [(tree.dotted(path), kind) for path, kind in tree.faults({"fine": torch.ones(2), "value": value})]
    assert found == ([expected] if expected else [])


def test_a_part_that_cannot_be_sent_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each: at the first `recover` or, where the first step puts it there, at the first commit. Where there is one
    rank, it sends to nobody."""
    model, optim = parts()
    live = LiveState(model=model, optim=optim, part=Part(np.float64(1)))

    def said() -> list[str]:
        return re.findall(r"the part ('\w+') cannot be given to another rank: ('[\w.]+')", caplog.text)

    live.recover()
    assert not said()
    monkeypatch.setattr(live_state, "gather", lambda wire, numbers: [list(numbers)] * 2)
    for _ in range(2):
        live.recover()
        assert said() == [("'part'", "'value'")]
    optim.param_groups[0]["lr"] = np.float64(0.1)
    for step in (1, 2):
        train(live, model, optim, step)
        assert said() == [("'part'", "'value'"), ("'optim'", "'param_groups.0.lr'")]
        live.recover()


def test_code_does_not_travel() -> None:
    with pytest.raises(LiveStateError, match="without running code"):
        tree.take({"a": Faulty}).header()


class Sender:
    """In place of `torch.distributed`: sends a state, each piece when it is waited for."""

    def __init__(self, tensors: list[torch.Tensor], damaged: int | None = None) -> None:
        self._pieces = [piece.clone() for piece in transfer.pieces(tensors)]
        self._sums = torch.stack([transfer.checksum(piece) for piece in self._pieces])
        self.asked_for, self.arrived, self.most = 0, 0, 0
        if damaged is not None:
            self._pieces[damaged][-1] ^= 1

    def get_backend_config(self, group: Any) -> str:
        return "cpu:gloo"

    def irecv(self, room: torch.Tensor, **_: Any) -> Any:
        number, self.asked_for = self.asked_for, self.asked_for + 1
        self.most = max(self.most, self.asked_for - self.arrived)

        def wait() -> None:
            assert number == self.arrived
            self.arrived += 1
            room.copy_(self._pieces[number])

        return SimpleNamespace(wait=wait)

    def recv(self, room: torch.Tensor, **_: Any) -> None:
        room.copy_(self._sums)


@pytest.mark.parametrize("damaged", [None, 0, 2, 6])
@pytest.mark.parametrize("count", [1, 7])
def test_pieces_are_asked_for_ahead(monkeypatch: pytest.MonkeyPatch, count: int, damaged: int | None) -> None:
    """And none is counted as there before it is: its checksum would be that of what was in its place."""
    monkeypatch.setattr(transfer, "PIECE", 64)
    sent = [torch.rand(16 * count)]
    sender = Sender(sent, None if damaged is None else min(damaged, count - 1))
    monkeypatch.setattr(transfer, "dist", sender)
    room = [torch.zeros(16 * count)]
    receive = functools.partial(transfer.Wire().receive, tree.Record({}, room), 0, "the state")
    if damaged is None:
        receive()
        assert same(room, sent)
    else:
        with pytest.raises(LiveStateError, match=f"1 of {count} pieces arrived damaged"):
            receive()
    assert sender.most == min(count, 1 + transfer.AHEAD)


@pytest.mark.parametrize("mine", [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(3, 2).t()])
def test_a_tensor_that_does_not_lie_in_one_piece(monkeypatch: pytest.MonkeyPatch, mine: torch.Tensor) -> None:
    """As of images with the channels last: what is received would go to a copy of it."""
    sent, strides = torch.rand(mine.shape), mine.stride()
    monkeypatch.setattr(transfer, "dist", Sender([sent]))
    transfer.Wire().receive(tree.Record({}, [mine]), 0, "the state")
    assert torch.equal(mine, sent)
    assert mine.stride() == strides


@pytest.mark.parametrize("size", [0, 1, 7, 8 * transfer.BLOCK, 8 * transfer.BLOCK + 9, 1 << 18])
def test_a_checksum_finds_each_damage(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    right = transfer.checksum(data)
    for at in {0, size // 2, size - 1} & set(range(size)):
        data[at] ^= 1
        assert transfer.checksum(data) != right
        data[at] ^= 1
    assert transfer.checksum(data) == right


def test_a_checksum_finds_a_block_in_another_place() -> None:
    data = torch.randint(0, 256, (4 * 8 * transfer.BLOCK,), dtype=torch.uint8)
    assert transfer.checksum(data.view(4, -1)[[1, 0, 2, 3]].reshape(-1)) != transfer.checksum(data)


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.ones(2, 3).t(), torch.ones(0, 3), torch.ones(4, 4)[::2]])
def test_bytes_of_any_tensor(tensor: torch.Tensor) -> None:
    assert transfer.flat(tensor).numel() == tensor.nbytes


def test_a_wait_for_a_checkpoint_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inprocess.live")
    late, written = 0.0, threading.Event()
    monkeypatch.setattr(clock, "monotonic", lambda: late)
    monkeypatch.setattr(patience, "SLICE", 0.01)
    work = Beside("a checkpoint")
    work.begin(7, written.wait)

    @contextlib.contextmanager
    def shown() -> Iterator[None]:
        """Each slice takes seven seconds; it is written in the third."""
        nonlocal late
        late += 7.0
        if late >= 21.0:
            written.set()
        yield

    assert patience.join_with_progress(work, 10**6, shown, "the checkpoint")
    assert caplog.records[0].message == "waiting for the checkpoint of step 7, for 14 s"
