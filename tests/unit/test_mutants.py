"""Mutants fit the code: each snippet is there once, what replaces it is Python, and no operator makes it."""

from __future__ import annotations

import ast
import builtins
import dis
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from inprocess.protocol import membership
from tests.mutants import ROOT, Edit, Mutant, Stale, applied
from tests.mutants.__main__ import judge
from tests.mutants.catalog import MUTANTS
from tests.mutants.generated import ROOMS, generate, is_generated
from tests.mutants.operators import changes, functions, makes


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_code(mutant: Mutant) -> None:
    for file, broken in mutant.sources().items():
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse((ROOT / file).read_text()))
        assert not undefined(broken, file), "a NameError would be noticed, in place of what is wrong"
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).is_file()
    assert mutant.seeds or not is_generated(mutant), "an operator makes it: it need not be written by hand"


def undefined(source: str, file: str) -> set[str]:
    """The global names that a module uses and has not."""
    module = compile(source, file, "exec", dont_inherit=True)
    known, used = {*dir(builtins), "__annotations__", "__file__"}, set()
    for code in inside(module):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname == "STORE_GLOBAL" or (code is module and instruction.opname == "STORE_NAME"):
                known.add(name)
            elif instruction.opname == "LOAD_GLOBAL" or (code is module and instruction.opname == "LOAD_NAME"):
                used.add(name)
    return used - known


def inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from inside(each)


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert undefined("import os\ndef f(a):\n    return os, a, len, Missing\n", "f.py") == {"Missing"}


def test_names_are_unique() -> None:
    assert set(Counter(mutant.name for mutant in MUTANTS).values()) == {1}


@pytest.mark.parametrize("source", ["", "ab ab"])
def test_a_stale_snippet_is_an_error(source: str) -> None:
    with pytest.raises(Stale, match=r"f\.py: this occurs"):
        Edit("f.py", "ab", "c").apply(source)


def test_applied_for_a_while() -> None:
    """Also for whoever imported the class before."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "always_included")
    gone = membership.Membership(member=1, roster=(0,))
    with applied(mutant):
        assert gone.included
    assert not gone.included


def test_only_a_failed_test_kills() -> None:
    assert judge(1, "x\nFAILED tests/a.py::test_b[1 - 2] - AssertionError: no\n1 failed") == (
        "tests/a.py::test_b[1 - 2]",
        "AssertionError: no",
    )
    assert judge(0, "1 passed") == ("", "SURVIVED")
    assert judge(2, "ERROR tests/a.py - SyntaxError")[1].startswith("pytest ended with 2")
    assert judge(None, "FAILED tests/a.py::test_b - x")[0] == ""


SOURCE = """
class A:
    def f(self, x: int, limit: float = 3) -> list | None:
        '''What it says.'''
        where: int | None = None
        log.info("%s", x + 1)
        if not x or x < limit:
            raise ValueError(x - 1)
        return [each for each in max(x, 2) if each]
"""


def test_generated_mutants() -> None:
    """Nothing of what is only said is changed, no type, and nothing stays changed."""
    tree = ast.parse(SOURCE)
    function = functions(tree)["A.f"]
    found = {(change.was, change.becomes) for change in changes(function)}
    assert found == {
        ("where: int | None = None", ""),
        ("if not x or x < limit:", ""),
        ("not x or x < limit", "True"),
        ("not x or x < limit", "False"),
        ("not x or x < limit", "not x"),
        ("not x or x < limit", "x < limit"),
        ("not x or x < limit", "not x and x < limit"),
        ("not x", "x"),
        ("x < limit", "x <= limit"),
        ("x < limit", "x >= limit"),
        ("return [each for each in max(x, 2) if each]", ""),
        ("return [each for each in max(x, 2) if each]", "return"),
        ("max(x, 2)", "x"),
        ("max(x, 2)", "2"),
        ("2", "3"),
        ("each", "True"),
        ("each", "False"),
    }
    assert ast.dump(tree) == ast.dump(ast.parse(SOURCE))


@pytest.mark.parametrize(
    ("body", "others"),
    [
        ("with a:\n    b()", ["pass", "b()"]),
        ("try:\n    a()\nfinally:\n    b()", ["pass", "a()\nb()", "a()"]),
        ("while True:\n    break", ["while True:\n    continue", "while True:\n    pass", "while False:\n    break"]),
        ("return (a, b)", ["return (a,)", "return (b,)"]),
        ("return a + b", ["return a - b", "return a", "return b"]),
        ("return a if b else c", ["return a", "return c"]),
        ("a(b is None)", ["a(b is not None)"]),
        ("return {1, 2}", ["return {2}", "return {2, 2}"]),
    ],
)
def test_what_a_statement_may_become(body: str, others: list[str]) -> None:
    def whole(text: str) -> str:
        return "def f():\n" + "".join(f"    {line}\n" for line in text.splitlines())

    assert all(makes(whole(body), whole(other)) for other in others)
    assert not makes(whole(body), whole(body))
    assert not makes(whole(body) + "def g(): a()", whole(others[0]) + "def g(): pass"), "these are two changes"


def test_a_generated_mutant(tmp_path: Path) -> None:
    """Each one is one change, and has its line and what it changes for a name."""
    (rules,) = (room for room in ROOMS if room.files.endswith("rules.py"))
    mutants = generate(rules)
    mutant = mutants[100]
    file = tmp_path / mutant.file
    file.parent.mkdir(parents=True)
    whole = (ROOT / mutant.file).read_text()
    file.write_text(whole)
    mutant.apply(tmp_path)
    assert makes(whole, file.read_text())
    assert re.fullmatch(r"inprocess/failover/rules\.py:\d+ [\w.]+: .+  ->  .+", f"{mutant.name} {mutant.rule}")
    assert len({(each.name, each.rule) for each in mutants}) > 200


def test_the_tests_of_generated_mutants_are_there() -> None:
    for room in ROOMS:
        assert [*ROOT.glob(room.files)], room.files
        assert all((ROOT / test.partition("::")[0]).is_file() for test in room.tests)
