"""JSON that came from elsewhere, as plain data: one kind of error for whatever is wrong with it. Pure."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["MAX_LENGTH", "parse"]

#: longest text that is looked into (bytes); a TCPStore takes no longer values
MAX_LENGTH = 8 << 20
#: nothing of ours is nested deeper; what is not can be compared and printed without a thought
MAX_DEPTH = 8


def parse(raw: bytes | str, limit: int | None = MAX_LENGTH) -> Any:
    """The value; `limit`: longest text (None: any).

    Raises:
        ValueError: too long, no UTF-8, no JSON, a name that appears twice in an object, NaN, a number of
            thousands of digits, or nested too deep.
    """
    if limit is not None and len(raw) > limit:
        raise ValueError(f"{len(raw)} bytes are more than {limit}")
    text = raw if isinstance(raw, str) else bytes(raw).decode()
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not _is_flat(value, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name appears twice in an object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _is_flat(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_flat(each, depth - 1) for each in inner)
