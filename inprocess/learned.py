"""Timeouts that are learned. The code is in `inprocess.monitor.learned`."""

from inprocess.monitor.learned import LearnedTimeouts

__all__ = ["LearnedTimeouts"]
