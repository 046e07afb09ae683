"""Timeouts that contradict each other, or the time that a step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings
from inprocess.exception import OptionError
from inprocess.options import Options

__all__ = ["CHECKS", "against_step"]

#: a step that is so many times as long as usual is no hang
MARGIN = 3.0


def options(settings: Settings) -> Iterator[Finding]:
    if not settings.options:
        raise NothingToLookAt("no --option is given")
    try:
        Options.build(**settings.options)
    except OptionError as error:
        what, because, _ = str(error).partition(", because")
        what = what if because else what.partition(": ")[0]
        why = "Wrapper raises OptionError for it when the program starts"
        remedy = (
            "raise the longer ones: soft_timeout < hard_timeout < barrier_timeout, heartbeat_timeout < barrier_timeout"
        )
        yield Finding("timeouts.order", "problem", what, why, remedy)


def step(settings: Settings) -> Iterator[Finding]:
    if settings.step is None:
        raise NothingToLookAt("no --step is given")
    yield from against_step(settings.options, settings.step)


def against_step(given: Mapping[str, float], longest: float) -> Iterator[Finding]:
    """Findings for timeouts of `Wrapper` (seconds; what is missing has its default) and the longest step (seconds)."""
    soft = given.get("soft_timeout", Options.soft_timeout)
    if longest * MARGIN <= soft:
        return
    is_short = longest >= soft
    yield Finding(
        "timeouts.step",
        "problem" if is_short else "warning",
        f"soft_timeout={soft:g} s, and a step takes up to {longest:g} s",
        "a step that is longer than it counts as a hang, and restarts all ranks"
        if is_short
        else f"a step that takes {soft / longest:.1f} times as long, as with a slow disk, restarts all ranks",
        f"soft_timeout={10 * longest:g} or more, with hard_timeout and barrier_timeout above it, or a section()",
    )


CHECKS = (
    Check(
        "timeouts.order",
        "the timeouts given by --option are in the order that Wrapper demands",
        "raise the longer ones",
        options,
    ),
    Check(
        "timeouts.step",
        "soft_timeout is at least three times the longest step, given by --step",
        "raise soft_timeout, or put long parts into a section()",
        step,
    ),
)
