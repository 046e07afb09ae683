"""A switch in user space: takes IP packets from each host's TUN device and gives them to the host they are for.

Each direction between two hosts is a wire of its own, which may lose packets, delay them, or be cut. A cut is silent:
no host is told, as when a switch somewhere in between is gone.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

MAX_PACKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Wire:
    """One direction between two hosts."""

    #: share of packets that are lost
    loss: float = 0.0
    #: seconds for which a packet is under way
    delay: float = 0.0
    #: nothing gets through
    cut: bool = False


class Switch(threading.Thread):
    """Forwards until `close`. `devices[host]` is the descriptor of a host's TUN device, its own from now on."""

    def __init__(self, devices: Sequence[int], seed: int) -> None:
        super().__init__(name="switch", daemon=True)
        self._devices = list(devices)
        self._chance = random.Random(seed)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        #: (when, number, host, packet): packets under way, the next one first
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._changed = threading.Condition()
        # replaced as a whole by the test, read by this thread
        self._wires: dict[tuple[int, int], Wire] = {}
        #: (from, to) -> packets; those that got through and those that did not
        self.passed: dict[tuple[int, int], int] = {}
        self.dropped: dict[tuple[int, int], int] = {}

    # --- the test's thread

    def set(self, wire: Wire, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        """Have these directions, or all of them, be like `wire` from now on."""
        everything = [(a, b) for a in range(len(self._devices)) for b in range(len(self._devices)) if a != b]
        self._wires = self._wires | dict.fromkeys(everything if pairs is None else pairs, wire)

    def unplug(self, host: int) -> float:
        """Nothing reaches this host any more, and nothing comes from it. Returns when (monotonic)."""
        return self.split([host])

    def plug_in(self, host: int) -> None:
        """Undo `unplug`: its wires are perfect again."""
        self.set(Wire(), self._between([host]))

    def split(self, side: Collection[int]) -> float:
        """Cut all wires between these hosts and the others. Returns when (monotonic)."""
        self.set(Wire(cut=True), self._between(side))
        return time.monotonic()

    def _between(self, side: Collection[int]) -> list[tuple[int, int]]:
        inside, outside = set(side), set(range(len(self._devices))) - set(side)
        return [pair for a in inside for b in outside for pair in ((a, b), (b, a))]

    def wait_dropped(self, host: int, count: int, deadline: float = 20.0) -> None:
        """Return once so many packets from or to this host were lost."""
        with self._changed:
            enough = self._changed.wait_for(lambda: self._dropped_at(host) >= count, deadline)
        assert enough, f"host {host} lost {self._dropped_at(host)} packets within {deadline:g} s, not {count}"

    def _dropped_at(self, host: int) -> int:
        return sum(count for pair, count in list(self.dropped.items()) if host in pair)

    def close(self) -> None:
        """End the thread and let the devices go."""
        os.eventfd_write(self._stop_fd, 1)
        self.join()
        for descriptor in (self._stop_fd, *self._devices):
            os.close(descriptor)

    # --- this thread

    def run(self) -> None:
        poll = select.poll()
        for descriptor in (self._stop_fd, *self._devices):
            poll.register(descriptor, select.POLLIN)
        hosts = {descriptor: host for host, descriptor in enumerate(self._devices)}
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._until_next())}
            if self._stop_fd in ready:
                return
            for descriptor in ready:
                self._take(hosts[descriptor])
            self._land()

    def _until_next(self) -> float | None:
        """Milliseconds until the next packet arrives somewhere."""
        return max(0.0, (self._flying[0][0] - time.monotonic()) * 1e3) if self._flying else None

    def _take(self, source: int) -> None:
        """Everything that a host has sent."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self._devices[source], MAX_PACKET_BYTES)
                target = packet[19] - 1  # the last byte of the destination's address
                if packet[0] >> 4 == 4 and 0 <= target < len(self._devices):
                    self._forward(source, target, packet)

    def _forward(self, source: int, target: int, packet: bytes) -> None:
        pair = (source, target)
        wire = self._wires.get(pair, Wire())
        if wire.cut or self._chance.random() < wire.loss:
            with self._changed:
                self.dropped[pair] = self.dropped.get(pair, 0) + 1
                self._changed.notify_all()
            return
        self.passed[pair] = self.passed.get(pair, 0) + 1
        self._number += 1
        heapq.heappush(self._flying, (time.monotonic() + wire.delay, self._number, target, packet))

    def _land(self) -> None:
        """Give those packets to their hosts whose time has come."""
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._flying)
            with suppress(OSError):  # no room: lost, as on any wire
                os.write(self._devices[target], packet)
