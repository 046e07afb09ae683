"""Which tests a plain run leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers


def item(place: str) -> Any:
    return SimpleNamespace(nodeid=f"tests/{place}")


@pytest.mark.parametrize(
    ("place", "quick"),
    [
        ("unit/test_options.py::test_any", True),
        ("sim/test_crashes.py::test_single_stops[all active-3]", False),
        ("ranks/test_deaths.py::test_one_dies[kill-0]", True),
        ("ranks/test_deaths.py::test_one_dies[kill-1]", False),
        ("examples/test_readme.py::test_two_commands_of_one_line_each", True),
        ("examples/test_two_nodes.py::test_a_node_is_lost_and_comes_back", False),
        ("united/test_other.py::test_any", False),
    ],
)
def test_quick(place: str, quick: bool) -> None:
    assert tiers.is_quick(item(place)) is quick


def test_a_name_that_no_test_has_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="names tests that are not there"):
        tiers._check([item("ranks/test_deaths.py::test_all_die")])
