"""Optimizers: their groups as they were at a commit, and their state as it was kept.

What a step changes, the state, belongs into a commit. Groups, and the options of each, may change at any time.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from inprocess.live.tree import Stateful, is_sharded, leaves, like

__all__ = ["Groups", "load", "make_state"]

#: values that cannot change; to copy those of an optimizer would take half of a commit
_FIXED = (int, float, str, type(None), tuple)


class Groups:
    """The groups of an optimizer at the last commit: the parameters and the options of each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: list[tuple[list[torch.Tensor], dict[str, Any]]] | None = None

    def keep(self) -> None:
        self._kept = [(list(group["params"]), _options(group)) for group in self._optimizer.param_groups]

    def can_give_back(self) -> bool:
        """Not where others were made, or some are gone, and the optimizer hands out a copy of its list of them."""
        groups = self._optimizer.param_groups
        return self._has_kept(groups) or groups is self._optimizer.param_groups

    def give_back(self) -> dict[torch.Tensor, Any]:
        """Those of the commit. Parameters that have come since then are out, so that the step in which they came can be
        done again; their state is what is returned."""
        if self._kept is None:
            return {}
        groups, dropped = self._optimizer.param_groups, {}
        if not self._has_kept(groups):
            before = {id(param) for params, _ in self._kept for param in params}
            for param in [param for group in groups for param in group["params"] if id(param) not in before]:
                if param in self._optimizer.state:
                    dropped[param] = self._optimizer.state.pop(param)
            groups[:] = [*groups, *({"params": []} for _ in self._kept)][: len(self._kept)]
        for group, (params, options) in zip(groups, self._kept, strict=True):
            if not _are_same(group["params"], params):
                group["params"] = list(params)
            group.update(_options(options))
        return dropped

    @contextlib.contextmanager
    def as_committed(self) -> Iterator[None]:
        """Inside they are those of the commit, then again what they were before."""
        groups, dropped = self._optimizer.param_groups, {}
        now = [(group, dict(group)) for group in groups]
        try:
            dropped = self.give_back()
            yield
        finally:
            groups[:] = [group for group, _ in now]
            for group, content in now:
                group.update(content)
                for key in group.keys() - content.keys():
                    del group[key]
            self._optimizer.state.update(dropped)

    def _has_kept(self, groups: list[dict[str, Any]]) -> bool:
        """Whether they have the parameters that were kept."""
        kept = self._kept
        return kept is None or (
            len(groups) == len(kept)
            and all(_are_same(group["params"], params) for group, (params, _) in zip(groups, kept, strict=True))
        )


def load(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """As ``load_state_dict``, but each tensor has the type that it was kept with.

    torch gives all but ``step`` the type of the parameters: float32 weights and averages beside bfloat16 parameters
    would be rounded on each rank that loads, and on the others not.
    """
    optimizer.load_state_dict(state)
    _put_back(optimizer.state_dict(), state)


def _put_back(now: Any, kept: Any) -> Any:
    """What is there now, with each tensor of another type replaced by the one that was kept."""
    if isinstance(now, torch.Tensor):
        is_other = isinstance(kept, torch.Tensor) and kept.dtype != now.dtype
        return kept.detach().to(now.device) if is_other else now
    if isinstance(now, Mapping) and isinstance(kept, Mapping):
        found: dict[Any, Any] = {key: value for key, value in now.items() if key in kept}
    elif isinstance(now, list | tuple) and isinstance(kept, list | tuple) and len(now) == len(kept):
        found = dict(enumerate(now))
    else:
        return now
    others = {key: new for key, value in found.items() if (new := _put_back(value, kept[key])) is not value}
    if others and isinstance(now, tuple):
        return like(now, found | others)
    for key, new in others.items():  # a state_dict() has the very containers of the state
        now[key] = new
    return now


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters: its learning rate, and so on."""
    return {
        key: value if isinstance(value, _FIXED) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }


def _are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def make_state(part: Stateful, state: Any) -> None:
    """Have an optimizer of sharded parameters make its state, so that there is somewhere to put what was kept.

    A step with gradients and a learning rate of zero; what else it may change is replaced in a moment.
    """
    if not isinstance(part, torch.optim.Optimizer) or part.state or not dict(leaves(state.get("state"))):
        return
    params = [param for group in part.param_groups for param in group["params"] if param.requires_grad]
    if not any(is_sharded(param) for param in params):
        return
    rates = [group["lr"] for group in part.param_groups]
    with torch.no_grad():
        for param in params:
            param.grad = torch.zeros_like(param)
    for group in part.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    part.step()
    for group, rate in zip(part.param_groups, rates, strict=True):
        group["lr"] = rate
    part.zero_grad(set_to_none=True)
