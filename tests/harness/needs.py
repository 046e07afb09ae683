"""Programs without which tests are not to be skipped: INPROCESS_TESTS_NEED names them, such as ``etcd,prometheus``."""

from __future__ import annotations

import os

__all__ = ["is_needed"]


def is_needed(program: str) -> bool:
    """Whether it is an error that this program is not there."""
    return program in os.environ.get("INPROCESS_TESTS_NEED", "").split(",")
