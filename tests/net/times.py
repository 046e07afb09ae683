"""The timeouts of the partition tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.harness.launch import PATIENT

#: a lost host is given up after four seconds; after 3.0 to 4.0 s it leaves by itself, after 3.6 s it is killed
WATCHFUL: Mapping[str, Any] = PATIENT | {
    "heartbeat_interval": 0.25,
    "heartbeat_timeout": 4,
    "soft_timeout": 10,
    "hard_timeout": 11,
    "barrier_timeout": 12,
}
#: the store is lost with its host
ALONE: Mapping[str, Any] = WATCHFUL | {"standby_stores": 0}
SLOW: Mapping[str, Any] = WATCHFUL | {
    "heartbeat_timeout": 12,
    "soft_timeout": 20,
    "hard_timeout": 22,
    "barrier_timeout": 24,
}
#: for wires that lose packets: TCP sends again after 0.2, 0.4, 0.8, ... s, and some packets are lost many times
TOLERANT: Mapping[str, Any] = PATIENT | {
    "heartbeat_interval": 1,
    "heartbeat_timeout": 90,
    "soft_timeout": 100,
    "hard_timeout": 110,
    "barrier_timeout": 120,
    "completion_timeout": 120,
}
