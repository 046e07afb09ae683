"""The parts as they are now, and at which step that is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from inprocess.exception import LiveStateError, OptionError
from inprocess.live.plan import NOTHING, Shard
from inprocess.live.tree import Record, Stateful, into, is_sharded, leaves, shard_of, take


class LiveParts:
    """Modules, optimizers and other parts, by name.

    Parameters and optimizer state change inside of commits alone. The rest, that is buffers of modules and all other
    parts, may change at any time: what they were at the last commit is kept.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = {name: checked(name, part) for name, part in parts.items()}
        self.shard = Shard()
        #: NOTHING: torn, or not known
        self.step = NOTHING
        #: whether it ever was at a step
        self.began = False
        modules = {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}
        self._parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self._version = 0
        self._with_buffers = {
            name: [(prefix, inner) for prefix, inner in module.named_modules() if inner._buffers]
            for name, module in modules.items()
        }
        self._others = {
            name: part
            for name, part in self.parts.items()
            if name not in modules and not isinstance(part, torch.optim.Optimizer)
        }
        self._buffers: dict[str, dict[str, torch.Tensor]] = {name: {} for name in modules}
        self._states: dict[str, Any] = {}

    def at(self, step: int) -> None:
        """They are those of this step."""
        with torch.no_grad():
            for name, modules in self._with_buffers.items():
                kept = self._buffers[name]
                for key, buffer in _buffers(modules):
                    room = kept.get(key)
                    if room is not None and room.shape == buffer.shape and room.dtype == buffer.dtype:
                        room.copy_(buffer)
                    else:
                        kept[key] = buffer.detach().clone()
        self._states = {name: copy.deepcopy(part.state_dict()) for name, part in self._others.items()}
        self._version = self._versions()
        self.step, self.began = step, True

    def tear(self) -> None:
        self.step = NOTHING

    def is_changed(self) -> bool:
        """Whether parameters were written to since then."""
        return self.step != NOTHING and self._versions() != self._version

    def _versions(self) -> int:
        """Goes up with each change of a parameter."""
        return sum(parameter._version for parameter in self._parameters)

    def find_shard(self) -> Shard:
        return shard_of(self._now())

    def record(self) -> Record:
        """What they were at that step; the parameters themselves, not copies."""
        states: dict[str, Any] = {}
        for name, part in self.parts.items():
            if name in self._states:
                states[name] = self._states[name]
                continue
            states[name] = dict(part.state_dict())
            kept = self._buffers.get(name, {})
            states[name].update({key: value for key, value in kept.items() if key in states[name]})
        return take(states)

    def give_back(self) -> None:
        """What may have changed since that step."""
        with torch.no_grad():
            for name, modules in self._with_buffers.items():
                for key, buffer in _buffers(modules):
                    if key in self._buffers[name]:
                        buffer.copy_(self._buffers[name][key])
        for name, state in self._states.items():
            self.parts[name].load_state_dict(copy.deepcopy(state))

    def shares(self, other: LiveParts) -> bool:
        """Whether any part is the same object."""
        return any(self.parts.get(name) is part for name, part in other.parts.items())

    def is_large(self, name: str) -> bool:
        """A module or an optimizer; other parts are small."""
        return name not in self._others

    def check_names(self, tree: Any) -> None:
        """Raises LiveStateError where a state is of other parts."""
        if set(tree) != set(self.parts):
            raise LiveStateError(
                f"the parts here are {', '.join(sorted(self.parts))}, and what was kept has {', '.join(sorted(tree))}: "
                "give every rank the same"
            )

    def room_for(self, tree: Any) -> Record:
        """Where the data of a state goes, before `load`."""
        self.check_names(tree)
        for name, part in self.parts.items():
            _fill_optimizer(part, tree[name])
        return into(self._now(), tree)

    def fill(self, record: Record) -> None:
        """With a state of this process."""
        room = self.room_for(record.tree)
        with torch.no_grad():
            for target, source in zip(room.tensors, record.tensors, strict=True):
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
        self.load(room)

    def load(self, room: Record) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(room.tree[name])

    def _now(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}


def _buffers(modules: list[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer


def checked(name: str, part: Any) -> Stateful:
    """The part, or what is in it. Raises OptionError where it is none."""
    if isinstance(part, torch.nn.parallel.DistributedDataParallel):
        part = part.module
    if not isinstance(part, Stateful):
        raise OptionError(f"{name}={part!r} must have state_dict() and load_state_dict()")
    return part


def _fill_optimizer(part: Stateful, state: Any) -> None:
    """Have an optimizer of sharded parameters make its state, so that there is somewhere to put what was kept.

    A step with gradients and a learning rate of zero; what else it may change is replaced in a moment.
    """
    if not isinstance(part, torch.optim.Optimizer) or part.state or not dict(leaves(state["state"])):
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
