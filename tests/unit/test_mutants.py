"""The list of mutants fits the code: each snippet is there once, and what replaces it is Python."""

from __future__ import annotations

import ast
import builtins
import dis
from collections import Counter
from collections.abc import Iterator
from types import CodeType

import pytest

from inprocess.protocol import membership
from tests.mutants import ROOT, Edit, Mutant, Stale, applied
from tests.mutants.__main__ import judge
from tests.mutants.catalog import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_code(mutant: Mutant) -> None:
    for file, broken in mutant.sources().items():
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse((ROOT / file).read_text()))
        assert not undefined(broken, file), "a NameError would be noticed, in place of what is wrong"
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).is_file()


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
