"""A sample of generated mutants of the modules that decide: `python -m tests.mutants.generated`.

These modules are pure, and their own tests say all that they do. So a mutant that those do not notice is either no
mutant at all (it computes the same), or shows what nobody has tested.

A hand-written mutant that the operators make is not needed: `tests/unit/test_mutants.py` refuses it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutants import ROOT, Mutant
from tests.mutants.__main__ import check, survivors
from tests.mutants.operators import Change, changes, functions, makes

#: of the mutants of a sample, so many may survive: some compute the same
MAY_LIVE = 0.2


@dataclass(frozen=True)
class Room:
    """Files that the same tests are about, the quickest first."""

    files: str
    tests: tuple[str, ...]


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


ROOMS = (
    Room(
        "inprocess/protocol/**/*.py",
        (
            *_unit("phases", "membership", "rounds", "repeats", "verbs_over_a_dict", "watching", "leaving_verbs"),
            *_unit("owner", "joining", "rank_assignment", "messages"),
            "tests/sim/test_found.py",
            "tests/sim/test_seeds.py::test_seeds[0]",
        ),
    ),
    Room("inprocess/monitor/policy.py", _unit("policy", "parsers")),
    Room("inprocess/monitor/timeouts.py", _unit("launcher_timeouts", "policy")),
    Room("inprocess/failover/rules.py", _unit("failover_rules")),
    Room("inprocess/live/plan.py", (*_unit("live_plan"), "tests/sim/test_seeds.py::test_seeds[0]")),
    Room("inprocess/rank_assignment/*.py", _unit("rank_assignment", "tree", "parsers")),
)


@dataclass(frozen=True)
class Generated:
    """A generated mutant, and the tests that should notice it."""

    file: str
    #: which one of its file
    number: int
    function: str
    change: Change
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Break a copy of the sources."""
        tree = ast.parse((root / self.file).read_text())
        next(itertools.islice(_changed(tree), self.number, None))
        (root / self.file).write_text(ast.unparse(tree))

    @property
    def name(self) -> str:
        return f"{self.file}:{self.change.line}"

    @property
    def rule(self) -> str:
        """What is wrong now."""
        return f"{self.function}: {self.change.was}  ->  {self.change.becomes or 'nothing'}"


def _changed(tree: ast.Module) -> Iterator[tuple[str, Change]]:
    """Each change, made in the tree while it is looked at, with the name of its function."""
    for name, function in functions(tree).items():
        yield from ((name, change) for change in changes(function))


def generate(room: Room) -> list[Generated]:
    """All mutants of a room."""
    found = []
    for path in sorted(ROOT.glob(room.files)):
        file = str(path.relative_to(ROOT))
        each = enumerate(_changed(ast.parse(path.read_text())))
        found += [Generated(file, number, name, change, room.tests) for number, (name, change) in each]
    return found


@cache
def files() -> frozenset[str]:
    """Those that there are generated mutants of."""
    return frozenset(str(path.relative_to(ROOT)) for room in ROOMS for path in ROOT.glob(room.files))


def is_generated(mutant: Mutant) -> bool:
    """Whether a hand-written mutant is one of these."""
    return all(
        file in files() and makes((ROOT / file).read_text(), broken) for file, broken in mutant.sources().items()
    )


def main(arguments: Sequence[str]) -> int:
    """Print what became of each mutant of a sample; 1 where too many survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.generated", description=__doc__)
    parser.add_argument("files", nargs="*", help="only files whose path contains one of these")
    parser.add_argument("--number", type=int, default=300, help="mutants to try; 0: all; default 300")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default 0")
    parser.add_argument("--at-a-time", type=int, default=2, help="how many; default 2")
    options = parser.parse_args(arguments)
    everything = [each for room in ROOMS for each in generate(room)]
    mutants = [each for each in everything if not options.files or any(name in each.file for name in options.files)]
    print(f"{len(mutants)} mutants of {len({each.file for each in mutants})} files", flush=True)
    if options.number:
        mutants = random.Random(options.seed).sample(mutants, min(options.number, len(mutants)))
    if not check(mutants):
        return 1
    alive = survivors(mutants, options.at_a_time)
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed")
    print(*(f"alive: {mutant.name} {mutant.rule}" for mutant in alive), sep="\n")
    return int(not mutants or len(alive) > MAY_LIVE * len(mutants))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
