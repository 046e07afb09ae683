"""The library broken on purpose, one rule at a time. A test that notices nothing proves nothing.

``catalog`` is the list. A mutant is text: in a file, a snippet that occurs exactly once is replaced by another one. So
it works wherever the code runs (threads, ranks, monitors), and one that does not fit the code any more is an error.

``python -m tests.mutants`` applies each to a copy of the sources and runs the tests that should notice. The ordinary
suite applies those marked ``seeds`` to the running process and asks the simulator alone.

``operators`` makes mutants that nobody has to write, by the thousand; ``python -m tests.mutants.generated`` tries a
sample of them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


class Stale(AssertionError):
    """A snippet does not occur exactly once: the code has changed, and so must the mutant."""


@dataclass(frozen=True)
class Edit:
    """One replacement."""

    #: relative to the repository's root
    file: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The source with the replacement made. Raises Stale."""
        count = source.count(self.old)
        if count != 1:
            raise Stale(f"{self.file}: this occurs {count} times, not once:\n{self.old}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutant:
    """A rule, broken."""

    name: str
    #: what is wrong now, in words
    rule: str
    edits: tuple[Edit, ...]
    #: the tests that should notice, the cheapest first
    tests: tuple[str, ...]
    #: random jobs in the simulator notice as well
    seeds: bool = False

    def sources(self) -> dict[str, str]:
        """The files it edits, broken. Raises Stale."""
        found: dict[str, str] = {}
        for edit in self.edits:
            found[edit.file] = edit.apply(found.get(edit.file) or (ROOT / edit.file).read_text())
        return found

    def apply(self, root: Path) -> None:
        """Break a copy of the sources. Raises Stale."""
        for file, source in self.sources().items():
            (root / file).write_text(source)


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The mutant in the running process: every function of the files it edits runs the mutated code meanwhile."""
    with contextlib.ExitStack() as stack:
        for file, source in mutant.sources().items():
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            mutated = types.ModuleType(module.__name__)
            exec(compile(source, str(ROOT / file), "exec"), mutated.__dict__)
            changed = _functions(mutated)
            for name, function in _functions(module).items():
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = changed[name].__code__
            for name in vars(mutated).keys() - vars(module).keys():  # what it imports beyond
                stack.callback(delattr, module, name)
                setattr(module, name, getattr(mutated, name))
        yield


def _functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """Functions and methods that are written in this module, without decorators, by qualified name."""
    found = {}
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else [value]
        for each in members:
            member = inspect.unwrap(each.fget if isinstance(each, property) else getattr(each, "__func__", each))
            if isinstance(member, types.FunctionType) and member.__module__ == module.__name__:
                found[member.__qualname__] = member
    return found
