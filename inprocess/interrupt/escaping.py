"""Whether an error that is being handled is sure to leave a function, read from the bytecode. Pure; runs nothing.

An error that passes through ``finally`` or ``with`` is on its way out; one that an ``except`` block handles may be
swallowed there. Both look the same from outside. The compiled code tells them apart: from where the frame stands, all
ways have to end in an exception that leaves it. A way that comes to the end of a handler, or returns, swallows it.

What is not known counts as swallowed: a ``with`` whose ``__exit__`` has yet to answer, an ``except`` block whose type
is not found by its name, all code before Python 3.11, which has no table of handlers. What runs meanwhile, the
clean-up, is taken to succeed.
"""

from __future__ import annotations

import bisect
import dis
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, NamedTuple

__all__ = ["Code", "Kinds", "answers_false"]

#: after these the next instruction is not reached
_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_RAISES = frozenset({"RERAISE", "RAISE_VARARGS"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
#: where `with` has called ``__exit__``, and where an `except` block asks whether the error is one of its own
_ASKS_EXIT, _ASKS_TYPE = "WITH_EXCEPT_START", "CHECK_EXC_MATCH"
#: at the begin of a handler that looks at the exception before it says whether it swallows it
_AWAITS = frozenset({"CLEANUP_THROW", "END_ASYNC_FOR"})
_TARGETS = frozenset({*dis.hasjrel, *dis.hasjabs})
#: of what an `except` block names its types with
_NAMING = frozenset({"LOAD_GLOBAL", "LOAD_ATTR", "BUILD_TUPLE", "EXTENDED_ARG", "CACHE", "RESUME"})


#: types of errors; None: one that is not known
Kinds = set[type[BaseException] | None]


class _Step(NamedTuple):
    """A place on the way."""

    at: int
    #: as long as so many exceptions are being handled, the error is among them, or another one in its place
    need: int
    #: the type of the error; None: another one has taken its place
    kind: type[BaseException] | None
    #: that instruction raises it
    raises: bool = False


@dataclass
class Code:
    """The instructions of one code object, and the ways through them.

    Args:
        code: the code.
        names: global ones of its function, and built-in ones.
    """

    code: CodeType
    names: Mapping[str, Any] = field(repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        instructions = list(dis.get_instructions(self.code))
        self._offsets = [each.offset for each in instructions]
        self._at = dict(zip(self._offsets, instructions, strict=True))
        self._next = dict(zip(self._offsets, self._offsets[1:], strict=False))
        #: missing before Python 3.11
        self._table = getattr(dis.Bytecode(self.code), "exception_entries", ())
        #: how many exceptions are being handled before each instruction
        self._depths = self._count()

    def after_handling(
        self, offset: int, kind: type[BaseException] | None, exit_is_false: bool = False, later: int = 0
    ) -> Kinds:
        """What leaves the frame, where an error is handled in it and what it calls returns.

        Args:
            offset: of the instruction that calls what runs now: a frame's ``f_lasti``.
            kind: the type of the error; None: not known.
            exit_is_false: where that is ``__exit__`` of a `with`: it does not swallow the error.
            later: so many other errors are handled in this frame since.

        Returns:
            The types of what leaves, None for one that is not known; empty: it may not leave.
        """
        here = self._begin(offset)
        need = self._depths.get(here, 0) - later
        if need <= 0:
            return set()
        after = self._following(here)
        if exit_is_false and self._at[here].opname == _ASKS_EXIT:
            after = [self._ways_at_jump(here)[0]]
        # what the handlers since then raise is another one
        return self._ways_out(_Step(each, need, None if later else kind) for each in after)

    def after_raising(self, offset: int, kind: type[BaseException] | None) -> Kinds:
        """Likewise, where it is raised there."""
        here = self._begin(offset)
        if here not in self._depths:
            return set()
        return self._ways_out([_Step(here, self._depths[here] + 1, kind, raises=True)])

    # --- the ways -------------------------------------------------------------------------------------------------

    def _ways_out(self, steps: Iterable[_Step]) -> Kinds:
        waiting, seen, kinds = list(steps), set[_Step](), Kinds()
        while waiting:
            step = waiting.pop()
            if step in seen:
                continue
            seen.add(step)
            if step.raises and self._handler(step.at) is None:
                kinds.add(step.kind)
                continue
            further = self._raise(step) if step.raises else self._pass(step)
            if further is None:
                return set()
            waiting += further
        return kinds

    def _raise(self, step: _Step) -> list[_Step] | None:
        """What follows an exception there. None: it may be swallowed."""
        target = self._handler(step.at)
        assert target is not None
        if self._at[target].opname == "PUSH_EXC_INFO":
            return [_Step(target, min(step.need, self._depths[target] + 1), step.kind)]
        end = self._undo(target)
        return None if end is None else [_Step(end, step.need, step.kind, raises=True)]

    def _pass(self, step: _Step) -> list[_Step] | None:
        """What follows that instruction. None: the error is swallowed."""
        instruction, following = self._at[step.at], self._following(step.at)
        name = instruction.opname
        if name in _RAISES:
            kind = None if name == "RAISE_VARARGS" and instruction.arg else step.kind
            return [step._replace(kind=kind, raises=True)]
        if name == "POP_EXCEPT" and self._depths[step.at] <= step.need:
            if self._at[following[0]].opname != "RERAISE":
                return None
        elif name == _ASKS_TYPE and (types := self._types_before(step.at)) is not None and step.kind is not None:
            passes, jumps = self._ways_at_jump(step.at)
            following = [passes if types.intersection(step.kind.__mro__) else jumps]
        return [step._replace(at=each) for each in following]

    def _undo(self, target: int) -> int | None:
        """A handler that only tidies up: where it raises again. None: it may swallow."""
        at: int | None = target
        while at is not None:
            name = self._at[at].opname
            if name == "RERAISE":
                return at
            if name in _RETURNS or name in _AWAITS or self._at[at].opcode in _TARGETS:
                return None
            at = self._next.get(at)
        return None

    def _ways_at_jump(self, at: int) -> tuple[int, int]:
        """Where it continues at the next jump that depends on something: without jumping, and with."""
        at = self._next[at]
        while not self._at[at].opname.startswith("POP_JUMP"):
            at = self._next[at]
        return self._next[at], self._at[at].argval

    def _types_before(self, at: int) -> set[Any] | None:
        """Those that the `except` block names there. None: they are not found by their names."""
        place = self._offsets.index(at)
        first = place
        while first and self._at[self._offsets[first - 1]].opname in _NAMING:
            first -= 1
        stack: list[Any] = []
        for offset in self._offsets[first:place]:
            each = self._at[offset]
            if each.opname == "LOAD_GLOBAL":
                stack.append(self.names.get(str(each.argval)))
            elif each.opname == "LOAD_ATTR":
                owner = stack.pop() if stack else None
                # no attribute that runs code
                stack.append(vars(owner).get(str(each.argval)) if isinstance(owner, ModuleType | type) else None)
            elif each.opname == "BUILD_TUPLE":
                stack[len(stack) - int(each.arg or 0) :] = [tuple(stack[len(stack) - int(each.arg or 0) :])]
        found = stack[-1:] if not stack or not isinstance(stack[-1], tuple) else list(stack[-1])
        return set(found) if found and all(isinstance(each, type) for each in found) else None

    def _following(self, at: int) -> list[int]:
        """Where it continues without an exception."""
        instruction = self._at[at]
        name = instruction.opname
        if name in _RETURNS or name in _RAISES:
            return []
        found = [instruction.argval] if instruction.opcode in _TARGETS else []
        if name not in _JUMPS and at in self._next:
            found.append(self._next[at])
        return found

    def _handler(self, at: int) -> int | None:
        """Where it continues with an exception; None: outside."""
        return next((each.target for each in self._table if each.start <= at < each.end), None)

    def _begin(self, offset: int) -> int:
        """The instruction there; a frame may stand in its cache."""
        return self._offsets[max(0, bisect.bisect_right(self._offsets, offset) - 1)]

    def _count(self) -> dict[int, int]:
        depths: dict[int, int] = {}
        todo = [(self._offsets[0], 0)]
        while todo:
            at, depth = todo.pop()
            if at in depths:
                continue
            depths[at] = depth
            if (target := self._handler(at)) is not None:
                todo.append((target, depth))
            depth += {"PUSH_EXC_INFO": 1, "POP_EXCEPT": -1}.get(self._at[at].opname, 0)
            todo += [(each, depth) for each in self._following(at)]
        return depths


def answers_false(code: CodeType) -> bool:
    """Whether a function returns nothing but None and False, as most ``__exit__`` do."""
    before: dis.Instruction | None = None
    for each in dis.get_instructions(code):
        if each.opname in _RETURNS:
            value = each if each.opname == "RETURN_CONST" else before
            if value is None or each.is_jump_target or value.opname not in ("RETURN_CONST", "LOAD_CONST"):
                return False
            if value.argval is not None and value.argval is not False:
                return False
        before = each
    return True
