"""All checks of the machine, in the order in which they run; ``docs/doctor.md`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inprocess.doctor import gpu, limits, names, timeouts, variables, versions
from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings

__all__ = ["CHECKS", "Examined", "examine"]

CHECKS: tuple[Check, ...] = (
    *versions.CHECKS,
    *names.CHECKS,
    *limits.CHECKS,
    *variables.CHECKS,
    *timeouts.CHECKS,
    *gpu.CHECKS,
)


@dataclass
class Examined:
    """What came of checks."""

    #: ids of those that ran
    ran: list[str] = field(default_factory=list)
    #: id -> why it had nothing to look at, or could not look
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def examine(settings: Settings, progress: Callable[[str], None], checks: Sequence[Check] = CHECKS) -> Examined:
    """Run them all. One that fails itself is named among the skipped, and the others run."""
    found = Examined()
    for check in checks:
        progress(f"{check.id}: {check.about}")
        try:
            findings = list(check.run(settings))
        except NothingToLookAt as reason:
            found.skipped[check.id] = str(reason)
        except Exception as error:  # on a machine that nobody has thought of, the other checks are still worth having
            found.skipped[check.id] = f"the check failed: {type(error).__name__}: {error}"
        else:
            found.ran.append(check.id)
            found.findings += findings
    return found
