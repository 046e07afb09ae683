"""The monitor process, as its rank knows it. The code is in `inprocess.monitor`."""

from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.process import MonitorProcess, reap_lingering

__all__ = ["MonitorConfig", "MonitorProcess", "reap_lingering"]
