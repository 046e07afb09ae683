"""Versions: of Python and torch, and whether torch has what the ranks need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings

__all__ = ["CHECKS"]

#: lowest and highest that were run, see docs/versions.md
PYTHONS, TORCHES = ((3, 10), (3, 14)), ((2, 9), (2, 15))


def python(_: Settings, found: tuple[int, ...] = sys.version_info[:2]) -> Iterator[Finding]:
    return _range("versions.python", "Python", found, PYTHONS)


def torch(_: Settings, version: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    try:
        text = version("torch")
    except metadata.PackageNotFoundError:
        yield Finding(
            "versions.torch",
            "problem",
            "torch is not installed in this Python",
            "ranks need it",
            f"{sys.executable} -m pip install 'torch>={_text(TORCHES[0])}'",
        )
        return
    yield from _range("versions.torch", "torch", tuple(int(part) for part in text.split(".")[:2]), TORCHES)


def backends(_: Settings) -> Iterator[Finding]:
    """What this build of torch has; whether it can be imported shows here, too."""
    try:
        import torch.distributed as dist  # noqa: PLC0415  # may be what does not work
    except (ImportError, OSError) as error:
        what = f"torch cannot be imported: {str(error).splitlines()[0]}"
        yield Finding("versions.backends", "problem", what, "ranks need it", "install torch again in this Python")
        return
    yield from missing_backend(dist.is_available(), dist.is_available() and dist.is_gloo_available())


def missing_backend(distributed: bool, gloo: bool) -> Iterator[Finding]:
    lacks = "torch.distributed" if not distributed else "Gloo" if not gloo else ""
    if lacks:
        yield Finding(
            "versions.backends",
            "problem",
            f"this build of torch has no {lacks}",
            "ranks agree through torch.distributed's store, and the doctor's own job runs over Gloo",
            "install a build of torch with torch.distributed and Gloo, such as the one on PyPI",
        )


def nccl(_: Settings) -> Iterator[Finding]:
    try:
        import torch.cuda.nccl  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415
    except (ImportError, OSError):
        raise NothingToLookAt("torch cannot be imported") from None
    if not dist.is_available() or not dist.is_nccl_available():
        raise NothingToLookAt("this build of torch has no NCCL")
    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield from nccl_version(found)


#: the one that torch 2.9 brings
LOWEST_NCCL = (2, 27)


def nccl_version(found: tuple[int, ...]) -> Iterator[Finding]:
    if found[:2] < LOWEST_NCCL:
        yield Finding(
            "versions.nccl",
            "note",
            f"NCCL {_text(found)} is older than {_text(LOWEST_NCCL)}",
            "the abort of its groups was written against the sources of NCCL 2.29",
            "install a build of torch with a newer NCCL",
        )


def _range(check: str, name: str, found: tuple[int, ...], allowed: tuple[tuple[int, ...], ...]) -> Iterator[Finding]:
    low, high = allowed
    if found < low:
        yield Finding(
            check,
            "problem",
            f"{name} {_text(found)} is older than {_text(low)}",
            "the library has not been run with it, and uses what it lacks",
            f"install {name} {_text(low)} or newer",
        )
    elif found > high:
        yield Finding(
            check,
            "note",
            f"{name} {_text(found)} is newer than {_text(high)}, the newest that was run",
            "restarts use some behaviour that torch and Python do not promise",
            "run your tests with inprocess.testing before you rely on it",
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


CHECKS = (
    Check(
        "versions.python",
        "Python is one of those that were run: the interrupt depends on the interpreter",
        "install a Python from 3.10 to 3.14",
        python,
    ),
    Check(
        "versions.torch",
        "torch is one of those that were run: restarts use some of its inner names",
        "install torch 2.9 or newer",
        torch,
    ),
    Check(
        "versions.backends",
        "torch can be imported and has torch.distributed and Gloo",
        "install a build of torch with both, such as the one on PyPI",
        backends,
    ),
    Check(
        "versions.nccl",
        "NCCL is not older than the one that torch 2.9 brings: the abort was written against NCCL 2.29",
        "install a build of torch with a newer NCCL",
        nccl,
    ),
)
