"""Who holds an object: the way to it from something that has a name, in words.

From the object outwards, one pass of ``gc.get_referrers`` over the whole heap for each step, until a name is met: an
attribute of a module or a class, or a local variable of a function that runs. A pass takes 25 to 60 ms in a process
with torch, and cannot be ended: so the time is looked at between two, and the next one is taken to last as long as the
one before.

What the collector does not list is not seen: C++ that holds an object, and what was frozen with ``gc.freeze()``, save
for the attributes of modules and what runs, which are looked at directly.

The search itself must not be found, nor leave anything behind. What it holds meanwhile is in a few lists that it
knows; it runs no code of the program's own, as far as Python lets one look at an object without; and up to Python 3.12
asking a frame for its variables makes the frame keep a copy of them, which is emptied again.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

from inprocess import clock
from inprocess.errors import PACKAGE, in_words
from inprocess.interpreter import running_frames

__all__ = ["Known", "Way", "a", "holders"]

#: how many objects one pass looks for at most; the time of a pass grows with their number
WIDEST = 32
#: of one pass, how many holders are looked at
MOST = 512
#: how many elements of a container are compared to find the place of one
LONGEST = 1_000_000
#: characters of a key or a message that are shown
SHOWN = 60

#: where no holder was looked for
_NOT_LOOKED = "is held by something else (the search takes no longer than this)"

#: also of a module whose class has ideas of its own
_module_space: Any = vars(ModuleType)["__dict__"].__get__
_GENERATORS = (GeneratorType, CoroutineType, AsyncGeneratorType)


@dataclass
class Known:
    """Holders that need no search, by the id of what they hold, and what it is to them."""

    owners: dict[int, Any] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)

    def add(self, thing: object, owner: object, words: str) -> None:
        """The first owner counts."""
        self.owners.setdefault(id(thing), owner)
        self.words.setdefault(id(thing), words)


@dataclass(frozen=True)
class Way:
    """Who holds an object: ``item 3 of a list, in attribute `losses` of module `train```."""

    words: str
    #: it leads to something that has a name
    ends: bool


def holders(objects: list[Any], seconds: float, known: Known | None = None) -> list[Way]:
    """For each object, who holds it.

    Nothing else of the caller may be in a container meanwhile, it would be taken for a holder.

    Args:
        objects: what to look for, a few; emptied.
        seconds: after which no pass over the heap begins.
        known: holders that the caller knows already.
    """
    search = _Search(objects, known or Known(), clock.monotonic() + seconds)
    count = len(objects)
    try:
        search.run()
        return [search.way(place) for place in range(count)]
    finally:
        objects.clear()


class _Search:
    """Objects are counted, so that only one list holds them: those that are looked for come first."""

    def __init__(self, objects: list[Any], known: Known, until: float) -> None:
        self._nodes, self._known, self._until = objects, known, until
        self._count = len(objects)
        self._places = {id(node): place for place, node in enumerate(objects)}
        #: who holds each
        self._above: list[list[int]] = [[] for _ in objects]
        #: where the way ends, and what it is called there
        self._names: dict[int, str] = {}
        self._looked: set[int] = set()
        self._ours = {id(objects), id(known.owners)}

    def run(self) -> None:
        frontier, took = list(range(self._count)), 0.0
        while frontier and (begin := clock.monotonic()) + took < self._until:
            before = len(self._nodes)
            self._name(frontier)
            if all(self._way(place)[-1] in self._names for place in range(self._count)):
                return
            self._expand([place for place in frontier if place not in self._names and not self._follow(place)])
            frontier = list(range(before, len(self._nodes)))[:WIDEST]
            took = clock.monotonic() - begin

    def way(self, place: int) -> Way:
        way = self._way(place)
        path = [self._nodes[each] for each in way]
        texts, at = list[str](), 0
        while at < len(path) - 1:
            text, used = self._link(path, at)
            texts.append(text)
            at += used
        ends = way[-1] in self._names
        if ends:
            texts.append(self._names[way[-1]])
        else:
            texts.append(f"{a(path[-1])} that {_out_of_sight() if way[-1] in self._looked else _NOT_LOOKED}")
        return Way(", in ".join(filter(None, texts)), ends)

    def _way(self, place: int) -> list[int]:
        """The places to the nearest one with a name; where there is none, to the one that was reached last."""
        below, waiting = {place: place}, deque([place])
        end = place
        while waiting:
            end = waiting.popleft()
            if end in self._names:
                break
            for each in self._above[end]:
                if each not in below:
                    below[each] = end
                    waiting.append(each)
        way = [end]
        while way[-1] != place:
            way.append(below[way[-1]])
        return way[::-1]

    def _add(self, node: Any) -> int:
        place = self._places.setdefault(id(node), len(self._nodes))
        if place == len(self._nodes):
            self._nodes.append(node)
            self._above.append([])
            if _is_end(node):
                self._names[place] = "the arguments of the wrapped function" if _is_ours(node) else ""
        return place

    def _name(self, frontier: Collection[int]) -> None:
        """Which of them are attributes of modules, or variables of functions that run."""
        wanted = {id(self._nodes[place]): place for place in frontier}
        for name, module in list(sys.modules.items()):
            space = _module_space(module) if issubclass(type(module), ModuleType) else {}
            for key, value in list(space.items()):
                if id(value) in wanted:
                    self._names.setdefault(wanted[id(value)], f"attribute `{key}` of module `{name}`")
        for thread, frame in _running():
            for key, each in _find_variables(frame, wanted):
                self._names.setdefault(wanted[each], f"{_variable(key, frame.f_code, frame.f_lineno)}{thread}")

    def _follow(self, place: int) -> bool:
        owner = self._known.owners.get(id(self._nodes[place]))
        if owner is not None:
            self._above[place].append(self._add(owner))
        return owner is not None

    def _expand(self, places: Collection[int]) -> None:
        """One pass over the heap."""
        targets = [self._nodes[place] for place in places]
        if not targets:
            return
        here = {id(self._nodes[place]): place for place in places}
        for holder in gc.get_referrers(*targets)[:MOST]:
            if holder is targets or id(holder) in self._ours or _is_searching(holder):
                continue
            above = self._add(holder)
            for each in here.keys() & set(map(id, gc.get_referents(holder))):
                self._above[here[each]].append(above)
        self._looked.update(places)

    def _link(self, path: list[Any], at: int) -> tuple[str, int]:
        """What it is to its holder, and how many steps that takes; no words where it is a detail of Python's."""
        child, holder = path[at], path[at + 1]
        if self._known.owners.get(id(child)) is holder:
            return self._known.words[id(child)], 1
        try:
            return next(words for kind, words in _LINKS if issubclass(type(holder), kind))(path, at)
        except Exception:  # a descriptor of the program's own
            return f"a part of {a(holder)}", 1


def _out_of_sight() -> str:
    """Where no holder was found."""
    frozen = ", or something that gc.freeze() has hidden" if gc.get_freeze_count() else ""
    return f"only C++ holds (a hook, an autograd graph){frozen}"


def _is_end(node: Any) -> bool:
    return issubclass(type(node), type | ModuleType) or _is_ours(node) or _is_global(node)


def _is_global(node: Any) -> bool:
    """The variables of a module, also of one that is not in sys.modules."""
    return type(node) is dict and type(node.get("__name__")) is str and "__builtins__" in node


def _is_ours(node: Any) -> bool:
    """The loop calls the wrapped function by a function of its own."""
    return type(node) is FunctionType and node.__code__.co_filename.startswith(PACKAGE)


def _is_searching(holder: Any) -> bool:
    """A frame of this library: before Python 3.11 the collector lists those that run."""
    return type(holder) is FrameType and holder.f_code.co_filename.startswith(PACKAGE)


# --- variables ----------------------------------------------------------------------------------------------------


def _running() -> Iterator[tuple[str, FrameType]]:
    """Frames of all threads, without this library's own, and in which thread each is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    for ident, frame in running_frames():
        if not frame.f_code.co_filename.startswith(PACKAGE):
            thread = "" if ident == main else f" in thread {names.get(ident, ident)!r}"
            yield f", which is running{thread}", frame


def _find_variables(frame: FrameType, wanted: Collection[int]) -> list[tuple[str, int]]:
    """Name and id of those among its variables."""
    values = frame.f_locals
    found = [(key, id(value)) for key, value in list(values.items()) if id(value) in wanted]
    # up to Python 3.12: a copy that the frame keeps. Not that of a program that has asked for locals() itself
    if type(values) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(values) <= 3:
        values.clear()
    return found


def _variable(name: str, code: Any, line: int) -> str:
    if code.co_name == "<module>":
        return f"global variable `{name}` of {os.path.basename(code.co_filename)}"
    return f"local variable `{name}` of function `{code.co_name}` ({os.path.basename(code.co_filename)}:{line})"


# --- what an object is to its holder ------------------------------------------------------------------------------


Link = Callable[[list[Any], int], tuple[str, int]]


def _in_dict(path: list[Any], at: int) -> tuple[str, int]:
    child, holder = path[at], path[at + 1]
    owner = path[at + 2] if at + 2 < len(path) else None
    entries = islice(dict.items(holder), LONGEST)
    key = next((shown(key) for key, value in entries if value is child), None)
    if key is None:
        return "a key of a dict", 1
    name = key.strip("'")
    if owner is not None and issubclass(type(owner), type):
        return f"class attribute `{name}` of `{owner.__module__}.{owner.__qualname__}`", 2
    if owner is not None and _space_of(owner) is holder:
        return f"attribute `{name}` of {a(owner)}", 2
    if _is_global(holder):
        return f"attribute `{name}` of module `{holder['__name__']}`", 1
    return f"value {key} of {a(holder)}", 1


def _in_sequence(path: list[Any], at: int) -> tuple[str, int]:
    child, holder = path[at], path[at + 1]
    place = next((place for place, each in enumerate(islice(holder, LONGEST)) if each is child), None)
    return f"an item of {a(holder)}" if place is None else f"item {place} of {a(holder)}", 1


def _in_cell(path: list[Any], at: int) -> tuple[str, int]:
    """A variable that inner functions share: value, cell, tuple of cells, function."""
    if at + 3 >= len(path) or type(path[at + 3]) is not FunctionType:
        return "", 1
    cell, cells, function = path[at + 1 : at + 4]
    code = function.__code__
    name = next(name for name, each in zip(code.co_freevars, cells, strict=False) if each is cell)
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return ("" if _is_ours(function) else f"variable `{name}` captured by function `{code.co_name}` ({place})"), 3


def _in_frame(path: list[Any], at: int) -> tuple[str, int]:
    frame = path[at + 1]
    return _of_frame(path[at], frame, frame.f_code), 1


def _in_generator(path: list[Any], at: int) -> tuple[str, int]:
    generator = path[at + 1]
    prefix = next(name for name in ("gi", "cr", "ag") if hasattr(generator, f"{name}_frame"))
    text = _of_frame(path[at], getattr(generator, f"{prefix}_frame"), getattr(generator, f"{prefix}_code"))
    return text.replace(" of function ", " of generator " if prefix == "gi" else " of coroutine "), 1


def _of_frame(child: Any, frame: FrameType, code: Any) -> str:
    if type(child) is FrameType:
        return f"the caller of function `{code.co_name}`"
    value = child.cell_contents if type(child) is CellType else child
    names = _find_variables(frame, {id(value)})
    return _variable(names[0][0], code, frame.f_lineno) if names else f"what function `{code.co_name}` works on"


def _in_exception(path: list[Any], at: int) -> tuple[str, int]:
    child, error = path[at], path[at + 1]
    roles = {"__traceback__": "the traceback", "__cause__": "the cause", "__context__": "the context"}
    for name, role in roles.items():
        if getattr(BaseException, name).__get__(error) is child:
            return f"{role} of {_brief(error)}", 1
    words, used = _in_object(path, at)
    return f"{words} ({_brief(error)})", used


def _in_function(path: list[Any], at: int) -> tuple[str, int]:
    code = path[at + 1].__code__
    return f"a default or an attribute of function `{code.co_name}` ({os.path.basename(code.co_filename)})", 1


def _in_method(path: list[Any], at: int) -> tuple[str, int]:
    return f"the object of a bound method `{path[at + 1].__func__.__name__}`", 1


def _in_object(path: list[Any], at: int) -> tuple[str, int]:
    """An instance that keeps its attributes without a dict."""
    child, holder = path[at], path[at + 1]
    for name, value in (_space_of(holder) or {}).items():
        if value is child:
            return f"attribute `{name}` of {a(holder)}", 1
    for kind in type(holder).__mro__:
        for name, slot in list(vars(kind).items()):
            if type(slot) is MemberDescriptorType and _of_slot(slot, holder) is child:
                return f"attribute `{name}` of {a(holder)}", 1
    return f"a part of {a(holder)}", 1


def _of_slot(slot: Any, holder: Any) -> Any:
    try:
        return slot.__get__(holder)
    except AttributeError:
        return None


def _space_of(holder: Any) -> dict[str, Any] | None:
    try:
        space = object.__getattribute__(holder, "__dict__")
    except Exception:
        return None
    return space if issubclass(type(space), dict) else None


def _nothing(path: list[Any], at: int) -> tuple[str, int]:
    return "", 1


def _element(path: list[Any], at: int) -> tuple[str, int]:
    return f"an element of {a(path[at + 1])}", 1


def _argument(path: list[Any], at: int) -> tuple[str, int]:
    return "the arguments of a functools.partial", 1


#: by type of the holder
_LINKS: tuple[tuple[Any, Link], ...] = (
    (dict, _in_dict),
    ((list, tuple, deque), _in_sequence),
    ((set, frozenset), _element),
    (CellType, _in_cell),
    (FrameType, _in_frame),
    (TracebackType, _nothing),
    (_GENERATORS, _in_generator),
    (BaseException, _in_exception),
    (FunctionType, _in_function),
    (MethodType, _in_method),
    (functools.partial, _argument),
    (object, _in_object),
)


def a(thing: object) -> str:
    """``a list``, ``an Adam``."""
    name = type(thing).__name__
    return f"{'an' if name[:1].upper() in 'AEIOU' else 'a'} {name}"


def shown(key: object) -> str:
    """A key, where showing it runs no code of the program's own."""
    text = repr(key) if type(key) in (str, int, float, bool, bytes, type(None)) else f"with {a(key)} as key"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _brief(error: BaseException) -> str:
    return in_words(error)[: len(type(error).__name__) + len(": ") + SHOWN]
