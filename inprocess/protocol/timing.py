"""Shares of ``heartbeat_timeout``: ranks, monitors and the host of the store agree on when somebody is lost."""

from __future__ import annotations

__all__ = ["LEASE_SHARE", "SILENCE_SHARE", "SURE_SHARE"]

#: the share of heartbeat_timeout after which a rank that cannot be heard is stopped: before the others go on without it
LEASE_SHARE = 0.9
#: the share after which its connections to the store count as lost: it has the rest of the lease to leave by itself
SILENCE_SHARE = 0.75
#: of that, for how long it is looked twice: after everything stood still, heartbeats get through at once
SURE_SHARE = 0.05
