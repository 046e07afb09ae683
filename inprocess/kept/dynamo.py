"""torch.compile takes the rank and the world size for constants of the code that it compiles.

So compiled code of an iteration in which this process had another rank, or the world another size, computes with the
wrong ones, and so does what a reserve has compiled while it warmed up, in a group of its own. Where both are as before
it is kept: to compile it again takes seconds. Elsewhere it is dropped, unless the program says by
`keep_compiled_code` that it asks for neither.

What the program says is checked: each module, class and function that code was compiled from is named by a guard, and
none may be of torch.distributed. Not every way is seen there: an operator or a function of the program's own may ask.
Tried with torch 2.13 and 2.15.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType

import torch

from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

__all__ = ["MODULE", "enter", "keep_compiled_code"]

log = get_logger("inprocess")
MODULE = "torch._dynamo"
#: the package that knows rank and world size
DISTRIBUTED = "torch.distributed"
#: in the text of a guard: the class of an object, what it is called, its identity
_NAMED = re.compile(r"type=<class '([^']*)'>|\bsource=([^,]+),|\b___check_(?:obj|type)_id\(.*?, (\d+)\)")
#: rank and world size of the iteration before, with which code may have been compiled
_place: tuple[int | None, int] | None = None
_keeps = False


def keep_compiled_code() -> None:
    """Say that what `torch.compile` compiles here asks for no rank, world size, group or mesh.

    Compiled code then stays where a restart changes the rank of this process or the size of the world, and what a
    reserve has compiled in `warm_up` stays, too. Without it such code is dropped and compiled again, which takes
    seconds to minutes: torch.compile takes rank and world size for constants.

    It is so where a plain module is compiled and then wrapped: ``DistributedDataParallel(torch.compile(model))``. It is
    not so where collectives, DTensors, fully_shard or DistributedDataParallel are inside of what is compiled, or
    operators and functions of your own that torch cannot look into and whose results depend on the world. Code of
    which torch's guards name anything of torch.distributed, or os.getenv, is dropped all the same, and the log says
    which.

    Call it once in each process, before the wrapped function. It holds until the process ends.
    """
    global _keeps  # one per process, as the compiler's caches are
    _keeps = True


def enter(rank: int | None, world_size: int) -> None:
    """Drop compiled code where it was compiled in another place; ``rank`` None: a reserve's."""
    global _place
    before, _place = _place, (rank, world_size)
    if before in (None, _place) or MODULE not in sys.modules:
        return
    if _keeps:
        if not (asks := _what_asks()):
            return
        log.warning("compiled code is dropped in spite of keep_compiled_code(): %s", asks)
    torch.compiler.reset()


def _what_asks() -> str:
    """Which code was compiled from something that knows the rank, or why that cannot be told; empty: none."""
    try:
        if not torch._C._dynamo.compiled_autograd.is_cache_empty():
            return "a backward pass was compiled, perhaps with its collectives"
        known = set(_identities())
        for code, guards in _compiled():
            for kind, source, number in _NAMED.findall(guards):
                if "distributed" in kind or "distributed" in source or int(number or 0) in known:
                    return f"{code.co_name} [{code.co_filename}:{code.co_firstlineno}] uses {DISTRIBUTED} or os.getenv"
    except Exception as error:
        return f"its guards cannot be read with torch {torch.__version__} ({in_words(error)})"
    return ""


def _compiled() -> Iterator[tuple[CodeType, str]]:
    """All compiled code of this process, with the text of its guards. Raises where torch has it no longer so."""
    from torch._dynamo.convert_frame import input_codes  # noqa: PLC0415  (it is loaded by now)
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # noqa: PLC0415

    for reference in list(input_codes.seen):
        if (code := reference()) is not None:
            for entry in _debug_get_cache_entry_list(code):
                if "source=" not in (text := str(entry.guard_manager)):
                    raise ValueError("they name nothing")
                yield code, text


def _identities() -> Iterator[int]:
    """Of the modules of torch.distributed, of its functions, with their code, and of its classes. And of os.getenv,
    whose result torch takes for a constant, unlike what is read from os.environ."""
    for name, module in list(sys.modules.items()):
        if (name == DISTRIBUTED or name.startswith(f"{DISTRIBUTED}.")) and isinstance(module, ModuleType):
            yield id(module)
            yield from _of(vars(module).values(), DISTRIBUTED)
    yield from _of([os.getenv], "os")


def _of(values: Iterable[object], package: str) -> Iterator[int]:
    for value in list(values):
        # no isinstance: what is deprecated there warns where it is asked for its class
        if issubclass(type(value), (FunctionType, type)) and str(value.__module__).startswith(package):
            yield id(value)
            if isinstance(value, FunctionType):
                yield id(value.__code__)
