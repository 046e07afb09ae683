"""The core restarts by itself, without what is around it."""

from __future__ import annotations

import pytest

from tests import core_alone


def test_the_core_alone_survives(capfd: pytest.CaptureFixture[str]) -> None:
    assert core_alone.main() == 0, capfd.readouterr().out
