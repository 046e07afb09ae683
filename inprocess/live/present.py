"""The parts as they are now, and at which step that is."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from inprocess.exception import LiveStateError, OptionError
from inprocess.interrupt.frames import leave_alone
from inprocess.live import optimizers
from inprocess.live.plan import NOTHING, Copy, Point, Shard
from inprocess.live.transfer import checksum, digest, flat
from inprocess.live.tree import Record, Stateful, into, local, put, shard_of, take


class LiveParts:
    """Modules, optimizers and other parts, by name.

    Parameters and optimizer state change inside of commits alone. The rest, that is buffers and extra state of modules,
    groups of optimizers and their options (a learning rate), and all other parts, may change at any time: what they
    were at the last commit is kept.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = {name: checked(name, part) for name, part in parts.items()}
        self.shard = Shard()
        #: NOTHING: torn, or not known
        self.step = NOTHING
        #: in which it was made; see `plan`
        self.history = 0
        #: whether they come of a training: a commit has begun, or they were received or loaded
        self.began = False
        modules = {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}
        self._parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self._version = 0
        #: of the parameters' bytes, since `recover` and until the first commit
        self._sums: list[torch.Tensor] | None = None
        self._optimizers = {name: part for name, part in self.parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._groups = {name: optimizers.Groups(part) for name, part in self._optimizers.items()}
        inner = [each for module in modules.values() for each in module.modules()]
        #: of each module that has buffers: what was in them
        self._buffers: dict[torch.nn.Module, dict[str, torch.Tensor]] = {each: {} for each in inner if each._buffers}
        self._with_extra = [each for each in dict.fromkeys(inner) if _has_extra_state(each)]
        self._extra: dict[torch.nn.Module, Any] = {}
        self._others = {
            name: part for name, part in self.parts.items() if name not in modules and name not in self._optimizers
        }
        self._states: dict[str, Any] = {}
        #: of the last two commits: which step, and the other parts
        self._last: list[tuple[Point, dict[str, Any]]] = []
        #: the other parts at the last commit, and at each refresh since
        self._since: list[dict[str, Any]] = []

    @property
    def held(self) -> Copy:
        """Which state it is."""
        return Copy(self.shard, self.step, self.history)

    def at(self, point: Point, refreshes: int = 0, earlier: Sequence[dict[str, Any]] = ()) -> None:
        """They are those of this step of its history.

        Args:
            refreshes: since the commit of that step.
            earlier: the other parts before these, as far as they are known.
        """
        self._keep()
        self._last = [*[each for each in self._last if each[0] != point][-1:], (point, self._states)]
        self._since = [*earlier, *[self._states] * (refreshes + 1 - len(earlier))]
        self._version, self._sums = self._versions(), None
        self.history, self.step = point

    def refresh(self) -> None:
        """What is no parameter has changed, and the step is the same."""
        self._keep()
        self._since.append(self._states)

    @property
    def refreshes(self) -> int:
        """How many there were since the last commit."""
        return len(self._since) - 1

    def back_to(self, refreshes: int) -> bool:
        """The other parts are again what they were after so many of them. Whether that changes anything."""
        if refreshes >= self.refreshes:
            return False
        self._states = self._since[refreshes]
        return True

    def earlier(self, refreshes: int) -> list[dict[str, Any]]:
        """The other parts at the commit, and at each refresh before that one."""
        return self._since[:refreshes]

    def _keep(self) -> None:
        """What may change at any time."""
        with torch.no_grad():
            for module, kept in self._buffers.items():
                for name, buffer in module._buffers.items():
                    room = kept.get(name)
                    if buffer is None:
                        kept.pop(name, None)
                    elif room is not None and room.shape == buffer.shape and room.dtype == buffer.dtype:
                        room.copy_(buffer)
                    else:
                        kept[name] = buffer.detach().clone()
        self._extra = {module: copy.deepcopy(module.get_extra_state()) for module in self._with_extra}
        for groups in self._groups.values():
            groups.keep()
        self._states = {name: copy.deepcopy(part.state_dict()) for name, part in self._others.items()}

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

    def change(self) -> str:
        """What was changed since then and cannot be given back; empty: nothing."""
        if self.step == NOTHING:
            return ""
        if not all(groups.can_give_back() for groups in self._groups.values()):
            return "the groups of an optimizer"
        if self._versions() == self._version:
            return ""
        if self._sums is not None and all(map(torch.equal, self._sums, self._checksums())):
            return ""
        return "parameters"

    def is_changed(self) -> bool:
        """Whether anything was."""
        return bool(self.change())

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
        with self._as_committed():
            return take(
                {
                    name: self._states[name] if name in self._states else part.state_dict()
                    for name, part in self.parts.items()
                }
            )

    @contextlib.contextmanager
    def _as_committed(self) -> Iterator[None]:
        """Inside, what is kept is in place of what is there now, for ``state_dict()``: only that knows by which names
        it goes. A module may be there twice, or in a wrapper that none of them shows."""
        with contextlib.ExitStack() as stack:
            for groups in self._groups.values():
                stack.enter_context(groups.as_committed())
            for module, kept in self._buffers.items():
                now = dict(module._buffers.items())
                stack.callback(_set_buffers, module, now)
                _set_buffers(module, {name: kept[name] for name in now if name in kept})
            for module, extra in self._extra.items():
                stack.callback(vars(module).pop, "get_extra_state", None)
                vars(module)["get_extra_state"] = lambda extra=extra: extra
            yield

    def give_back(self) -> None:
        """What may have changed since that step."""
        with torch.no_grad():
            for module, kept in self._buffers.items():
                for name, buffer in list(module._buffers.items()):
                    if buffer is None or name not in kept:
                        continue
                    if kept[name].shape == buffer.shape and kept[name].dtype == buffer.dtype:
                        put(buffer, kept[name])
                    elif any(each is buffer for each in module.state_dict(keep_vars=True).values()):
                        # others are caches, as of positions, that have grown
                        module._buffers[name] = kept[name].clone()
        for module, extra in self._extra.items():
            module.set_extra_state(copy.deepcopy(extra))
        for groups in self._groups.values():
            groups.give_back()
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
        """History, step and a digest of the small parts then, for the last two commits; a step of `NOTHING` where there
        is none."""
        found = [number for point, states in self._last for number in (*point, digest(states))]
        return [*found, *[0, NOTHING, 0] * (2 - len(self._last))]

    def digest(self, name: str, point: Point) -> int:
        """Of one of them; 0: not known."""
        return next((digest(states[name]) for at, states in reversed(self._last) if at == point and name in states), 0)

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
            optimizers.make_state(part, tree[name])
        return into(self._now(), tree)

    def written_back(self) -> None:
        """Each value was written onto itself."""
        self._version = self._versions()

    def fill(self, record: Record) -> None:
        """With a state of this process."""
        room = self.room_for(record.tree)
        with torch.no_grad():
            for target, source in zip(room.tensors, record.tensors, strict=True):
                if target.data_ptr() != source.data_ptr():
                    put(target, source)
        self.load(room)

    def load(self, room: Record) -> None:
        for name, part in self.parts.items():
            if isinstance(part, torch.optim.Optimizer):
                optimizers.load(part, room.tree[name])
            else:
                part.load_state_dict(room.tree[name])

    def _now(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}


def _set_buffers(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    for name, buffer in buffers.items():
        module._buffers[name] = buffer


def _has_extra_state(module: torch.nn.Module) -> bool:
    """Whether it has one that it can be given back: its history of scaling factors, say."""
    kind, base = type(module), torch.nn.Module
    has: bool = kind.get_extra_state is not base.get_extra_state and kind.set_extra_state is not base.set_extra_state
    return has


def checked(name: str, part: Any) -> Stateful:
    """The part, or what is in it. Raises OptionError where it is none."""
    if isinstance(part, torch.nn.parallel.DistributedDataParallel):
        part = part.module
    if not isinstance(part, Stateful):
        raise OptionError(f"{name}={part!r} must have state_dict() and load_state_dict()")
    return part


# an interruption would leave what was kept in place of what is there, for good
leave_alone(LiveParts.record.__code__)
