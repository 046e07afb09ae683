"""Timeouts that are learned. The code is in `inprocess.heartbeats.learned`."""

from inprocess.heartbeats.learned import LearnedTimeouts

__all__ = ["LearnedTimeouts"]
