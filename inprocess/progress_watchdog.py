"""The thread that looks whether the main thread runs. The code is in `inprocess.monitor.watchdog`."""

from inprocess.monitor.watchdog import ProgressWatchdog, Silence

__all__ = ["ProgressWatchdog", "Silence"]
