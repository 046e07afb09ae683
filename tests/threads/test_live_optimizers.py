"""Optimizers of a LiveState: types of their state, and their groups, on other ranks and where a step is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess import LiveState
from inprocess.exception import StateLost
from inprocess.live import tree
from inprocess.live.present import LiveParts

from .test_live_parts import Give, committed, send, to_others
from .test_live_state import parts, setup_module, train  # noqa: F401  (setup_module runs here too)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Master(torch.optim.Optimizer):
    """Keeps the weights in float32, and other things in other types."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["master"] = param.detach().float().clone()
                    state["seen"] = torch.zeros((), dtype=torch.int64)
                    state["nested"] = {"both": [torch.zeros(2, dtype=torch.float64)], "pair": (torch.zeros(2), 1)}
                state["seen"] += 1
                state["nested"]["both"][0] += 1 / 3
                state["master"] -= group["lr"] * param.grad.float()
                param.copy_(state["master"])


def optimized(kind: Any, steps: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).bfloat16()
    optim = kind(model.parameters())
    learn(model, optim, range(steps))
    return model, optim


def learn(model: torch.nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optim.zero_grad()
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(inputs).square().sum().mul(0.01).backward()
        optim.step()


def kept_of(optim: torch.optim.Optimizer) -> list[tuple[tree.Path, torch.dtype, Any]]:
    return [(path, leaf.dtype, leaf.tolist()) for path, leaf in tree.leaves(optim.state_dict()["state"])]


def same_from_now_on(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    assert kept_of(one[1]) == kept_of(other[1])
    for model, optim in (one, other):
        learn(model, optim, range(3, 30))
    return torch.equal(one[0].weight, other[0].weight)


kinds = pytest.mark.parametrize("kind", [Master, torch.optim.NAdam, torch.optim.AdamW], ids=lambda kind: kind.__name__)


@to_others
@kinds
def test_the_state_of_an_optimizer_has_the_types_that_it_had(kind: Any, give: Give) -> None:
    """torch's load_state_dict gives it those of the parameters: replicas would drift apart."""
    one, other = optimized(kind, 3), optimized(kind)
    give(committed(3, model=one[0], optim=one[1]), LiveParts({"model": other[0], "optim": other[1]}))
    assert same_from_now_on(one, other)


@kinds
def test_the_same_of_a_checkpoint(tmp_path: Path, kind: Any) -> None:
    one, other, third = optimized(kind), optimized(kind), optimized(kind, 1)
    live = LiveState(model=one[0], optim=one[1], folder=tmp_path, save_every=3)
    live.recover()
    for step in range(3):
        with live.commit(step + 1):
            learn(*one, range(step, step + 1))
    live.wait()
    for model, optim in (other, third):
        assert LiveState(model=model, optim=optim, folder=tmp_path).recover() == 3
    assert kept_of(third[1]) == kept_of(other[1])
    assert same_from_now_on(one, other)


def test_a_state_that_another_load_has_rounded_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    """The program's own, say: the next rank has made its state anew, and would have another one."""
    one, other = optimized(Master), optimized(Master, 3)
    live = LiveState(model=one[0], optim=one[1], folder=tmp_path, save_every=3)
    live.recover()
    with live.commit(3):
        learn(*one, range(3))
    live.wait()
    other[1].load_state_dict(other[1].state_dict())
    assert other[1].state[other[0].weight]["master"].dtype == torch.bfloat16
    assert LiveState(model=other[0], optim=other[1], folder=tmp_path).recover() == 3
    assert same_from_now_on(one, other)


def test_the_state_of_an_optimizer_is_in_memory_once() -> None:
    one, other = optimized(Master, 3), optimized(Master, 1)
    before = other[1].state[other[0].weight]["master"]
    send(committed(3, model=one[0], optim=one[1]), LiveParts({"model": other[0], "optim": other[1]}))
    assert other[1].state[other[0].weight]["master"].data_ptr() == before.data_ptr()


class Scaled(torch.optim.SGD):
    """Says its state in another type than it has it in."""

    def state_dict(self) -> Any:
        found = super().state_dict()
        state = {key: {name: each.float() for name, each in value.items()} for key, value in found["state"].items()}
        return found | {"state": state}


def test_a_type_that_only_the_state_dict_has_does_not_get_into_the_state() -> None:
    one, other = (
        optimized(lambda params: Scaled(params, 0.1, momentum=0.9), 3),
        optimized(Scaled),
    )
    send(committed(3, model=one[0], optim=one[1]), LiveParts({"model": other[0], "optim": other[1]}))
    assert other[1].state[other[0].weight]["momentum_buffer"].dtype == torch.bfloat16


def grown(model: torch.nn.Module, optim: torch.optim.Optimizer) -> torch.nn.Parameter:
    """A group more, with something in its state."""
    more = torch.nn.Parameter(torch.ones(2))
    optim.add_param_group({"params": [more], "lr": 7.0})
    optim.state[more]["step"] = torch.tensor(1.0)
    return more


@to_others
def test_a_group_that_came_after_the_commit_is_of_the_step_that_is_repeated(give: Give) -> None:
    """Others get the state without it, it is gone where the step is repeated, and can be added again."""
    one, other = optimized(torch.optim.AdamW, 3), optimized(torch.optim.AdamW)
    live = committed(3, model=one[0], optim=one[1])
    for _ in range(2):
        more = grown(*one)
        one[1].param_groups[0]["lr"] = 5.0
        give(live, LiveParts({"model": other[0], "optim": other[1]}))
        assert [group["lr"] for group in one[1].param_groups] == [5.0, 7.0] and more in one[1].state
        live.give_back()
        assert [group["lr"] for group in one[1].param_groups] == [0.001] and more not in one[1].state
    assert same_from_now_on(one, other)


def test_a_group_that_is_added_at_the_same_step_each_time() -> None:
    model, optim = parts()
    more = torch.nn.Parameter(torch.ones(2))
    live = LiveState(model=model, optim=optim)
    live.recover()
    for again in (False, True):
        train(live, model, optim, 2)
        optim.add_param_group({"params": [more]})
        if not again:
            assert (live.recover(), live.source) == (2, "own memory")
    train(live, model, optim, 4)
    assert live.recover() == 4
    assert len(optim.param_groups) == 2 and optim.param_groups[1]["params"][0] is more


def test_groups_that_were_changed_or_left_out_since_the_commit() -> None:
    model, _ = parts()
    first, second, *_ = list(model.parameters())
    more = torch.nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 2.0}])
    live = committed(model=model, optim=optim)
    before = optim.state_dict()
    optim.param_groups[0]["params"].append(more)
    del optim.param_groups[1]
    assert live.record().tree["optim"]["param_groups"] == before["param_groups"]
    assert len(optim.param_groups) == 1 and optim.param_groups[0]["params"][1] is more
    live.give_back()
    assert optim.state_dict() == before
    assert optim.param_groups[0]["params"][0] is first and optim.param_groups[1]["params"][0] is second


class Both(torch.optim.Optimizer):
    """Two optimizers as one, with a list of their groups that is made anew each time."""

    def __init__(self, *optims: torch.optim.Optimizer) -> None:
        self.optims = optims

    @property
    def param_groups(self) -> Any:
        return [group for optim in self.optims for group in optim.param_groups]

    @property
    def state(self) -> Any:
        return {}

    def state_dict(self) -> Any:
        return {"optims": [optim.state_dict() for optim in self.optims]}

    def load_state_dict(self, state: Any) -> None:
        for optim, each in zip(self.optims, state["optims"], strict=True):
            optim.load_state_dict(each)


@to_others
def test_an_optimizer_with_a_state_dict_of_its_own(give: Give) -> None:
    def both() -> tuple[torch.nn.Module, Both]:
        model, _ = parts()
        return model, Both(*(torch.optim.SGD([each], lr=0.1) for each in model.parameters()))

    (model, optim), (other, optim_of_other) = both(), both()
    live = committed(model=model, optim=optim)
    optim.param_groups[2]["lr"] = 9.0
    give(live, LiveParts({"model": other, "optim": optim_of_other}))
    assert [group["lr"] for group in optim_of_other.param_groups] == [0.1] * 4
    assert optim.param_groups[2]["lr"] == 9.0
    live.give_back()
    assert optim.param_groups[2]["lr"] == 0.1


def test_groups_that_cannot_be_given_back(caplog: pytest.LogCaptureFixture) -> None:
    """The state counts as torn."""
    model, _ = parts()
    optim = Both(*(torch.optim.SGD([each], lr=0.1) for each in model.parameters()))
    live = LiveState(model=model, optim=optim)
    live.recover()
    with live.commit(1):
        pass
    optim.optims[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(StateLost):
        live.recover()
    assert "the groups of an optimizer were changed after commit(1)" in caplog.text
