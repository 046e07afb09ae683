"""The core is to restart alone: what it imports from outside becomes less, never more. docs/design/architecture.md."""

from __future__ import annotations

import re

from .test_layers import FILES, MODULES, ROOT, imports, within

ETCD = {"stores/etcd.py"}
#: file of the core -> the modules outside that it still imports
OUTWARDS = {
    "call/agents.py": {"failover.arbiter_client", "failover.member", "heartbeats.launcher"},
    "call/disabled.py": {"heartbeats.learned"},
    "call/hooks.py": {"rank_assignment", "rank_assignment.base"},
    "call/job.py": {"events.record"},
    "call/leaving.py": {"events.stream"},
    "call/local_place.py": {"hardware.gpu"},
    "call/loop.py": {"events.stream", "hardware.leftovers", "heartbeats.launcher"},
    "call/rank.py": {"failover.arbiter_client", "rank_assignment"},
    "call/restart.py": {"kept.registry"},
    "call/start.py": {
        "events.stream",
        "hardware.leftovers",
        "heartbeats.launcher",
        "kept.registry",
        "rank_assignment",
    },
    "call/thread.py": {"events.stream", "failover.member"},
    "call/user_code.py": {"events.stream", "hardware.leftovers"},
    "call_wrapper.py": {"events.stream", "heartbeats.learned"},
    "health_check.py": {"hardware.gpu", "hardware.nic"},
    "interrupt/frames.py": {"events.stream"},
    "monitor/files.py": {"events.stream"},
    "monitor/link.py": {"failover.standby"},
    "monitor/live_file.py": {"events.files", "events.live_files", "events.record"},
    "monitor/program.py": {"events.record", "events.stream"},
    "monitor/relay.py": {"events.digest", "events.files", "events.record", "events.stream"},
    "wrap.py": {"events.stream", "rank_assignment"},
}


def core() -> tuple[str, ...]:
    """What its row of the table names: folders with a slash, and modules of the root."""
    (row,) = re.findall(r"^\| core \|([^|]*)\|", (ROOT / "docs/design/architecture.md").read_text(), re.MULTILINE)
    return tuple(name if name.endswith("/") else f"{name}.py" for name in re.findall(r"`([\w/]+)`", row))


def is_core(file: str) -> bool:
    return file not in ETCD and any(file.startswith(name) if name.endswith("/") else file == name for name in core())


def test_the_core_imports_no_more_from_outside() -> None:
    """Take away here what is gone; nothing may come."""
    inside = [path for path in FILES if is_core(within(path))]
    found = {
        within(path): {name for name in imports(path) if name and not is_core(within(MODULES[name]))} for path in inside
    }
    assert {file: names for file, names in found.items() if names} == OUTWARDS
