"""Streams that take nothing more: what a terminal after Ctrl-S, or a log collector that is stuck, is for a program."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def full(kind: str = "pipe") -> Iterator[int]:
    """The end to write to of a pipe, or a socket, that nobody reads. A write blocks until the block is left."""
    if kind == "pipe":
        reading, writing = os.pipe()
    else:
        reading, writing = (each.detach() for each in socket.socketpair())
    os.set_blocking(writing, False)
    fill(writing)
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(reading)


def fill(descriptor: int) -> None:
    """Write to it, which does not block, until nothing more can be written."""
    for size in (1 << 16, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptor, b"x" * size)
