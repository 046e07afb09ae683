"""The thread that watches for restarts. The code is in `inprocess.call.thread`."""

from inprocess.call.mailbox import Mailbox
from inprocess.call.thread import Admission, JoinRequest, MonitorThread
from inprocess.exception import RankShouldRestart

#: older names
LetIn, WayIn = Admission, JoinRequest

__all__ = ["Admission", "JoinRequest", "LetIn", "Mailbox", "MonitorThread", "RankShouldRestart", "WayIn"]
