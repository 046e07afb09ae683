"""Variables of the job that work against restarts, and what it says of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings
from inprocess.exception import OptionError
from inprocess.options import nearest
from inprocess.system.environment import LAUNCH, derived

__all__ = ["CHECKS"]

#: variables that users set for this library
OURS = ("INPROCESS_RUN_DIR", "INPROCESS_DOCTOR_SEED", "INPROCESS_JOB", LAUNCH)
#: and those of its launcher and its tests
INNER = (
    *("INPROCESS_LAUNCHER", "INPROCESS_LAUNCHER_KEY", "INPROCESS_LAUNCHER_LEARNS"),
    *("INPROCESS_RESTART", "INPROCESS_GROW", "INPROCESS_TEST"),
)
#: how long NCCL may try a connection to a rank that is gone (seconds)
PATIENCE_S = 10.0


def torch(settings: Settings) -> Iterator[Finding]:
    """What rank 0 warns of in a job whose torch has NCCL; here in any case, as the job may run elsewhere."""
    try:
        from inprocess.collectives.nccl import objections  # noqa: PLC0415  # imports torch, which may be broken
    except (ImportError, OSError):
        raise NothingToLookAt("torch cannot be imported") from None
    for text in objections(settings.environ):
        what, _, rest = text.partition(": ")
        why, _, remedy = rest.rpartition("; ")
        yield Finding("variables.torch", "warning", f"{what} is set", why, remedy)


def nccl(settings: Settings) -> Iterator[Finding]:
    environ = settings.environ
    count, pause = (_number(environ.get(name)) for name in ("NCCL_SOCKET_RETRY_CNT", "NCCL_SOCKET_RETRY_SLEEP_MSEC"))
    # the n-th pause is n times as long; what is not set, the library sets for the time of a call
    count, pause = 10 if count is None else count, 20 if pause is None else pause
    if (waits := count * (count + 1) / 2 * pause / 1e3) > PATIENCE_S:
        yield Finding(
            "variables.nccl",
            "warning",
            f"NCCL_SOCKET_RETRY_CNT and NCCL_SOCKET_RETRY_SLEEP_MSEC make it try a connection for {waits:g} s",
            "nothing reaches a rank that tries to connect to one that is gone, so the restart waits",
            "unset both: 10 and 20, which make 1.1 s, are set for the time of a call",
        )
    if environ.get("NCCL_RAS_ENABLE", "0") != "0":
        yield Finding(
            "variables.nccl",
            "warning",
            f"NCCL_RAS_ENABLE={environ['NCCL_RAS_ENABLE']} is set",
            "this service of NCCL may crash where a restart ends the connections of a rank that is gone",
            "unset it, or set 0",
        )
    if environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") not in ("", "0"):
        yield Finding(
            "variables.nccl",
            "warning",
            f"TORCH_NCCL_USE_COMM_NONBLOCKING={environ['TORCH_NCCL_USE_COMM_NONBLOCKING']} is set",
            "a rank that waits for one that is gone while its group is made may loop for ever",
            "unset it",
        )


def ranks(settings: Settings) -> Iterator[Finding]:
    environ = settings.environ
    try:
        environ = {**environ, **derived(environ)}
    except OptionError as error:
        what, _, remedy = str(error).rpartition(". ")
        yield Finding("variables.ranks", "problem", what, "a wrapped function raises OptionError then", remedy)
        return
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not given:
        raise NothingToLookAt("RANK and WORLD_SIZE are not set")
    values = {name: _number(environ[name]) for name in given}
    wrong = [f"{name}={environ[name]}" for name, value in values.items() if value is None]
    rank, size = values.get("RANK"), values.get("WORLD_SIZE")
    what = ""
    if wrong:
        what = f"{' and '.join(wrong)}: not a number from 0 on"
    elif len(given) == 1:
        what = f"of RANK and WORLD_SIZE only {given[0]}={environ[given[0]]} is set"
    elif rank is not None and size is not None and rank >= size:
        what = f"RANK={rank} is not below WORLD_SIZE={size}"
    if what:
        why = "a wrapped function raises OptionError then"
        remedy = "let the launcher set both: inprocess run --nproc-per-node N script.py"
        yield Finding("variables.ranks", "problem", what, why, remedy)


def names(settings: Settings) -> Iterator[Finding]:
    for name in settings.environ:
        if name.startswith("INPROCESS_") and name not in OURS and not name.startswith(INNER):
            hint = nearest(name, OURS)
            yield Finding(
                "variables.names",
                "warning",
                f"{name} is no variable of this library",
                "it has no effect",
                f"write {hint}" if hint else f"unset it; there is {', '.join(OURS)}",
            )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


CHECKS = (
    Check(
        "variables.torch",
        "TORCH_NCCL_* and TORCH_DISTRIBUTED_DEBUG with which torch's watchdog ends processes that a restart would keep",
        "unset what the finding names",
        torch,
    ),
    Check(
        "variables.nccl",
        "NCCL_* with which NCCL waits long for a rank that is gone, or crashes where it is released",
        "unset what the finding names",
        nccl,
    ),
    Check(
        "variables.ranks",
        "RANK and WORLD_SIZE, where they are set, fit together",
        "let the launcher set them",
        ranks,
    ),
    Check(
        "variables.names",
        "variables that begin with INPROCESS_ are known to the library",
        "correct the name",
        names,
    ),
)
