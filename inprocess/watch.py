"""A watch over workers without a Wrapper. The code is in `inprocess.heartbeats`."""

from inprocess.heartbeats.launcher import announce_nobody_left, announce_over, announce_wrapped, ask_launcher
from inprocess.heartbeats.messages import ACTIONS, Action
from inprocess.heartbeats.watch import Watch, monitored

__all__ = [
    "ACTIONS",
    "Action",
    "Watch",
    "announce_nobody_left",
    "announce_over",
    "announce_wrapped",
    "ask_launcher",
    "monitored",
]
