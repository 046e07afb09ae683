"""The core imports nothing of what is around it, and so can be read and run by itself. docs/design/architecture.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core_alone import ring

from .test_layers import FILES, MODULES, imports, within


@pytest.mark.parametrize("path", FILES, ids=within)
def test_imports_point_to_the_ring_itself_or_further_in(path: Path) -> None:
    own = ring(within(path))
    found = {name for name in imports(path) if name and ring(within(MODULES[name])) > own}
    assert not found, f"{within(path)} is in ring {own}, and these are further out"
