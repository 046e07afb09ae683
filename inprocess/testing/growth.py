"""What a program has more of at each restart, and the line that makes it so.

At each entry of the function everything that can be counted is: Python threads and open files by name, children, the
containers in the modules of the program, and what it has registered. What is more at every single entry than at the one
before grows without an end; what is made once, in the first run, does not.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import ModuleType
from typing import Any

from inprocess.interrupt.whereabouts import is_users
from inprocess.system.errors import PACKAGE

from . import leaks
from .patching import change
from .registrations import EXTENDED, REPLACED, Key, Registrations, whole

__all__ = ["Growth", "line_of", "users_line"]

_CONTAINERS = (list, dict, set, deque)
#: those that are looked into
_DICTS = (dict, defaultdict, OrderedDict)
#: methods with which a container grows
_GROWING = frozenset({"add", "append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update"})
#: numbers that make names of the same kind differ
_NUMBERS = re.compile(r"\d+")
#: the name of the library's threads that free groups (`collectives.background`)
_FREEING = "inprocess-free"
#: entries from which on growth can be told: in the first run things are made that stay
ENTRIES = 3
#: a dict with more than so many items is counted whole: to look at each, at each entry, would be slow
LARGE = 4000


def users_line() -> str:
    """The innermost line of the program's own that is running: ``train.py:12 in register``; empty without one."""
    frame = sys._getframe(1)
    while frame is not None and not (is_users(frame) and _is_file(frame.f_code.co_filename)):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def line_of(error: BaseException) -> str:
    """The innermost line of the program's own in the traceback of an error, or of what caused it."""
    found = line_of(error.__cause__) if error.__cause__ is not None else ""
    step = None if found else error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if is_users(step.tb_frame) and _is_file(code.co_filename):
            found = f"{_short(code.co_filename)}:{step.tb_lineno} in {code.co_name}"
        step = step.tb_next
    return found


def _is_file(name: str) -> bool:
    return not name.startswith("<") and "-packages" + os.sep not in name


def _short(file: str) -> str:
    """As a reader in the working directory would name it."""
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative


class Growth:
    """Counts at each entry. ``lines()`` names what has grown at every one."""

    def __init__(self) -> None:
        self._counts: list[Counter[str]] = []
        #: name -> the line of the program where one of these was last made
        self._made: dict[str, str] = {}
        self._modules: dict[str, tuple[ModuleType, str]] = {}
        self._registered = Registrations(users_line)
        #: variables that had a process group when the function was last entered, and where they get it: a restart has
        #: ended it
        self.groups: list[str] = []

    def watch(self) -> None:
        """Note from now on where threads are started, files opened and processes made."""

        def noted(start: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
            self._made[_thread(thread)] = users_line()
            start(thread)

        change(threading.Thread, "start", noted)
        sys.addaudithook(self._audit)
        self._registered.watch()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and not args[0].endswith((".py", ".pyc")):
            self._made[_descriptor(os.path.abspath(args[0]))] = users_line()
        elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._made["child processes"] = users_line()

    def count(self) -> None:
        """The function is entered."""
        # those that free groups have a moment's work, which may reach into the next iteration
        found = Counter(_thread(thread) for thread in threading.enumerate() if thread.name != _FREEING)
        # files only: sockets and pipes are the library's own, too
        found.update(_descriptor(target) for target in leaks.descriptors().values() if target.startswith(os.sep))
        found["child processes"] = len(leaks.children_of(os.getpid()))
        self.groups = []
        found.update(dict(self._registered.sizes(self._kept(found))))
        self._counts.append(found)

    def _kept(self, found: Counter[str]) -> Iterator[tuple[str, Key, Any]]:
        """What the modules of the program keep, see `registrations.whole`; on the way containers are counted, and
        groups noted."""
        for module in modules():
            for name, attribute, value in _variables(module):
                if isinstance(value, _CONTAINERS):
                    kind = f"the {type(value).__name__} {name}"
                    found[kind] = _size(value)
                    self._modules[kind] = (module, attribute)
                for key, part in _with_values(value):
                    if is_group(part):
                        given = _given(module, attribute, whole("", key))
                        self.groups.append(f"{whole(name, key)}{_at(given)}")
                    yield name, key, part

    def lines(self) -> list[str]:
        """One line for each thing that grew at every entry; empty where there were too few to tell."""
        if len(self._counts) < ENTRIES:
            return []
        sizes = {name: [count[name] for count in self._counts] for name in self._counts[-1]}
        return [
            f"{name}: {', '.join(map(str, of_it))} at the entries of the function{self._by(name)}"
            for name, of_it in sizes.items()
            if all(before < after for before, after in pairwise(of_it))
        ]

    def _by(self, name: str) -> str:
        if name in self._modules:
            return _at(_lines(*self._modules[name], _enlarges), "; it grows")
        if name in REPLACED:
            return _at(list(_everywhere(REPLACED[name], _assigns)), "; it is replaced")
        if name in EXTENDED:
            return _at(list(_everywhere(EXTENDED[name], _enlarges)), "; more are added")
        made = self._made | self._registered.made
        return f"; the last was made in {made[name]}" if made.get(name) else ""


def _thread(thread: threading.Thread) -> str:
    return f"threads named {_NUMBERS.sub('N', thread.name)!r}"


def _descriptor(file: str) -> str:
    folder, name = os.path.split(file)
    return f"descriptors of {os.path.join(folder, _NUMBERS.sub('N', name))}"


def _variables(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """(whole name, last name, value) of what a module of the program has: in itself, in its classes, and in its objects
    of these."""
    for name, value in public(vars(module)):
        yield f"{module.__name__}.{name}", name, value
        if _is_of(value, module):
            for inner, part in public(_space(value)):
                yield f"{module.__name__}.{name}.{inner}", inner, part


def owners(module: ModuleType) -> list[Any]:
    """A module of the program, its classes, and its objects of these, as far as they have variables."""
    inner = [value for _, value in public(vars(module)) if _is_of(value, module) and _space(value)]
    return [module, *inner]


def _space(value: object) -> Mapping[str, Any]:
    """The variables of a class or an object. Its own `__getattr__`, which may raise anything, is not asked for them."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def public(space: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Without Python's own names; a copy, which other threads do not change."""
    return [(name, value) for name, value in list(space.items()) if not name.startswith("__")]


def _with_values(value: Any) -> list[tuple[Key, Any]]:
    """Itself and, where it is a dict that is not large, its values."""
    return [((), value), *(((key,), part) for key, part in _items(value))]


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Of a dict that is not large; those of other classes may do anything when they are asked."""
    return list(value.items()) if type(value) in _DICTS and len(value) <= LARGE else []


def _size(container: Any) -> int:
    """With what is in the values of a dict: a list for each name, say."""
    return len(container) + sum(len(value) for _, value in _items(container) if isinstance(value, _CONTAINERS))


def modules() -> Iterator[ModuleType]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and file and _is_programs(os.path.abspath(file)):
            yield module


def _is_of(value: object, module: ModuleType) -> bool:
    """Whether it is a class of this module, or an object of one."""
    owner = value if isinstance(value, type) else type(value)
    return owner.__module__ == module.__name__


def is_group(value: object) -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and isinstance(value, dist.ProcessGroup)


def _is_programs(file: str) -> bool:
    places = (PACKAGE, os.path.dirname(os.__file__) + os.sep)
    return file.endswith(".py") and _is_file(file) and not file.startswith(places)


# --- the line -----------------------------------------------------------------------------------------------------


Does = Callable[[Any, str], bool]


def _at(lines: list[str], what: str = ",") -> str:
    return f"{what} in {' and '.join(lines)}" if lines else ""


def _lines(module: ModuleType, name: str, does: Does) -> list[str]:
    """Where the program does this to something with this name; in its module first, else in any."""
    found = list(_search(module, name, does))
    return list(dict.fromkeys(found or _everywhere(name, does)))


def _given(module: ModuleType, name: str, key: str) -> list[str]:
    """Where the variable gets its value, or a dict the one of this key (``['a']``)."""

    def does(node: Any, name: str) -> bool:
        targets = [t for t in getattr(node, "targets", []) if isinstance(t, ast.Subscript) and _is_named(t.value, name)]
        return any(f"[{ast.unparse(target.slice)}]" == key for target in targets)

    return (key and (_lines(module, name, does) or _lines(module, name, _enlarges))) or _lines(module, name, _assigns)


def _everywhere(name: str, does: Does) -> Iterator[str]:
    for module in modules():
        yield from _search(module, name, does)


def _search(module: ModuleType, name: str, does: Does) -> Iterator[str]:
    file = str(module.__file__)
    with contextlib.suppress(OSError, SyntaxError):
        with open(file, encoding="utf-8") as source:
            text = source.read()
        for node, function in _statements(ast.parse(text), ""):
            if does(node, name):
                where = f" in {function}" if function else ""
                yield f"{_short(file)}:{node.lineno}{where}: `{text.splitlines()[node.lineno - 1].strip()}`"


def _statements(tree: ast.AST, function: str) -> Iterator[tuple[Any, str]]:
    """Every node, with the function that it is in."""
    for node in ast.iter_child_nodes(tree):
        yield node, function
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from _statements(node, inner)


def _enlarges(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _GROWING and _is_named(node.func.value, name)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) and _is_named(target.value, name) for target in node.targets)
    return isinstance(node, ast.AugAssign) and _is_named(node.target, name)


def _assigns(node: ast.AST, name: str) -> bool:
    """Something other than None."""
    targets = [t.value if isinstance(t, ast.Subscript) else t for t in getattr(node, "targets", [])]
    return (
        any(_is_named(target, name) for target in targets) and isinstance(node, ast.Assign) and not _is_none(node.value)
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
