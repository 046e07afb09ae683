"""JSON that came from elsewhere, as plain data: one kind of error for whatever is wrong with it. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

__all__ = ["MAX_LENGTH", "parse"]

#: longest text that is looked into (bytes); a TCPStore takes no longer values
MAX_LENGTH = 8 << 20
#: nothing of ours is nested deeper; what is not can be compared and printed without a thought
MAX_DEPTH = 8
#: longest number (bits): each is below what a float can be
MAX_BITS = 1023
#: half of a character, as file names in another encoding have them in Python: UTF-8 has none
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse(raw: bytes | str, limit: int | None = MAX_LENGTH, *, keep_halves: bool = False) -> Any:
    """The value; `limit`: longest text (None: any). All numbers fit into a float, all texts into UTF-8: what is no
    character becomes its escape, unless `keep_halves`, for the paths of this machine.

    Raises:
        ValueError: too long, no UTF-8, no JSON, a name that appears twice in an object, NaN, a number that is infinite
            or has hundreds of digits, or nested too deep.
    """
    if limit is not None and len(raw) > limit:
        raise ValueError(f"{len(raw)} bytes are more than {limit}")
    text = raw if isinstance(raw, str) else bytes(raw).decode()
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    _check(value, MAX_DEPTH)
    return _whole(value) if not keep_halves and _HALF.search(text) else value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name appears twice in an object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


def _check(value: Any, depth: int) -> None:
    kind = type(value)
    if kind is dict or kind is list:
        if not depth:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        for each in value.values() if kind is dict else value:
            if type(each) is not str:
                _check(each, depth - 1)
    elif kind is int and value.bit_length() > MAX_BITS:
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    elif kind is float and math.isinf(value):
        raise ValueError("a number is infinite")


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {_whole(name): _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
