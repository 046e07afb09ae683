"""Network adapters with RDMA (InfiniBand, RoCE) in the kernel's device tree: which are near a GPU, and their links."""

from __future__ import annotations

import errno
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Link", "nearest", "ports", "read_link", "went_down"]

_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True)
class Link:
    """A port at one moment."""

    state: str  # such as "4: ACTIVE"; empty if it cannot be read
    downs: dict[str, int]  # counter -> times that it saw the link go down


def ports(sysfs: Path, names: list[str]) -> list[Path]:
    """The ports of these adapters."""
    return sorted(port for name in names for port in (_base(sysfs) / name / "ports").glob("*"))


def read_link(sysfs: Path, port: Path) -> Link | None:
    """None: the port is not there (any more)."""
    try:
        state = (port / "state").read_text().strip()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR):
            return None
        state = ""
    counters = {
        "link_downed": port / "counters" / "link_downed",
        "hw link_downed": port / "hw_counters" / "link_downed",
    }
    if _read(port / "link_layer") == "Ethernet" and (interface := _read(port / "gid_attrs" / "ndevs" / "0")):
        # RoCE: the network interface counts; of a bond the bond's own, which stays up while one of its links does
        counters[interface] = sysfs / "class" / "net" / interface / "carrier_down_count"
    read = {name: _read(path) for name, path in counters.items()}
    return Link(state, {name: int(value) for name, value in read.items() if value.isdecimal()})


def went_down(before: Link, now: Link | None) -> bool:
    """Whether the link is down that was up, or was down meanwhile. A counter that was reset says nothing."""
    if now is None or ("ACTIVE" in before.state and now.state and "ACTIVE" not in now.state):
        return True
    return any(count > before.downs.get(name, count) for name, count in now.downs.items())


def nearest(sysfs: Path, gpu: str) -> list[str]:
    """Names of the adapters with the longest PCI path in common with the GPU of this PCI address.

    If none hangs on the same PCI root: those of the same NUMA node; else the only one, if there is but one. Virtual
    functions are left out where the adapter that they are a part of is there too: it knows the link.
    """
    adapters = _adapters(sysfs)
    target = (sysfs / "bus" / "pci" / "devices" / gpu).resolve()
    near = {name: _shared(target, device) for name, device in adapters.items()}
    longest = max(near.values(), default=0)
    if longest > 0:
        return sorted(name for name, shared in near.items() if shared == longest)
    node = _read(target / "numa_node")
    if node.isdecimal():  # -1: the machine does not say
        return sorted(name for name, device in adapters.items() if _read(device / "numa_node") == node)
    return sorted(adapters) if len(adapters) == 1 else []


def _adapters(sysfs: Path) -> dict[str, Path]:
    """Name -> place in the device tree."""
    base = _base(sysfs)
    found = {path.name: (path / "device").resolve() for path in base.iterdir()} if base.is_dir() else {}
    whole = set(found.values())
    return {name: device for name, device in found.items() if (device / "physfn").resolve() not in whole}


def _shared(a: Path, b: Path) -> int:
    """How many steps of the way two devices share; 0 if they are not under one PCI root."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.parts, b.parts, strict=False))
    steps = [step for step, _ in pairs]
    return len(steps) if any(_PCI_ROOT.fullmatch(step) for step in steps) else 0


def _base(sysfs: Path) -> Path:
    return sysfs / "class" / "infiniband"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
