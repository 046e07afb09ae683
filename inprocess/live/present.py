"""The parts as they are now, and at which step that is."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from inprocess.exception import LiveStateError, OptionError
from inprocess.live.plan import NOTHING, Shard
from inprocess.live.transfer import checksum, digest, flat
from inprocess.live.tree import Record, Stateful, into, is_sharded, leaves, local, shard_of, take

#: values that cannot change; to copy those of an optimizer would take half of a commit
_FIXED = (int, float, str, type(None), tuple)


class LiveParts:
    """Modules, optimizers and other parts, by name.

    Parameters and optimizer state change inside of commits alone. The rest, that is buffers of modules, options of
    optimizers (a learning rate) and all other parts, may change at any time: what they were at the last commit is kept.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = {name: checked(name, part) for name, part in parts.items()}
        self.shard = Shard()
        #: NOTHING: torn, or not known
        self.step = NOTHING
        #: whether they come of a training: a commit has begun, or they were received or loaded
        self.began = False
        modules = {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}
        self._parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self._version = 0
        #: of the parameters' bytes, since `recover` and until the first commit
        self._sums: list[torch.Tensor] | None = None
        self._optimizers = {name: part for name, part in self.parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._with_buffers = {
            name: [(prefix, inner) for prefix, inner in module.named_modules() if inner._buffers]
            for name, module in modules.items()
        }
        self._others = {
            name: part for name, part in self.parts.items() if name not in modules and name not in self._optimizers
        }
        self._buffers: dict[str, dict[str, torch.Tensor]] = {name: {} for name in modules}
        self._options: dict[str, list[dict[str, Any]]] = {}
        self._states: dict[str, Any] = {}
        #: of the last two commits: which step, and the other parts
        self._last: list[tuple[int, dict[str, Any]]] = []

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
        self._options = {name: _options(part) for name, part in self._optimizers.items()}
        self._states = {name: copy.deepcopy(part.state_dict()) for name, part in self._others.items()}
        self._last = [*[each for each in self._last if each[0] != step][-1:], (step, self._states)]
        self._version, self._sums = self._versions(), None
        self.step = step

    def recovered(self) -> None:
        """What is written now and changes no value, as by DistributedDataParallel(model), does not count.

        It takes one reading of the parameters.
        """
        self._sums = self._checksums()

    def begin_commit(self) -> None:
        self.began = True
        self.tear()

    def tear(self) -> None:
        self.step = NOTHING

    def is_changed(self) -> bool:
        """Whether parameters were changed since then."""
        if self.step == NOTHING or self._versions() == self._version:
            return False
        return self._sums is None or not all(map(torch.equal, self._sums, self._checksums()))

    def _checksums(self) -> list[torch.Tensor]:
        with torch.no_grad():
            tensors = [local(parameter) for parameter in self._parameters]
            return [checksum(flat(tensor)) for tensor in tensors if not tensor.is_meta]

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
            states[name] = copy.copy(part.state_dict())
            if name in self._options:
                groups = states[name]["param_groups"]
                states[name]["param_groups"] = [
                    group | kept for group, kept in zip(groups, self._options[name], strict=True)
                ]
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
        for name, options in self._options.items():
            for group, kept in zip(self._optimizers[name].param_groups, copy.deepcopy(options), strict=True):
                group.update(kept)
        for name, state in self._states.items():
            self.parts[name].load_state_dict(copy.deepcopy(state))

    def clear(self) -> None:
        """What an interrupted step leaves half done, and no ``state_dict()`` has: gradients, a scaler's stage."""
        groups = (group for optimizer in self._optimizers.values() for group in optimizer.param_groups)
        for parameter in (*self._parameters, *(parameter for group in groups for parameter in group["params"])):
            parameter.grad = None
        for part in self._others.values():
            if isinstance(part, torch.amp.GradScaler):
                part._per_optimizer_states.clear()

    def shares(self, other: LiveParts) -> bool:
        """Whether any part is the same object."""
        return any(self.parts.get(name) is part for name, part in other.parts.items())

    @property
    def small(self) -> Collection[str]:
        """Names of the parts that are neither modules nor optimizers."""
        return self._others.keys()

    def digests(self) -> list[int]:
        """A step and a digest of the small parts then, for the last two commits; `NOTHING` where there is none."""
        found = [number for step, states in self._last for number in (step, digest(states))]
        return [*found, *[NOTHING, 0] * (2 - len(self._last))]

    def digest(self, name: str, step: int) -> int:
        """Of one of them; 0: not known."""
        return next((digest(states[name]) for at, states in reversed(self._last) if at == step and name in states), 0)

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


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group of parameters: its learning rate, and so on."""
    return [
        {
            key: value if isinstance(value, _FIXED) else copy.deepcopy(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


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
