"""A monitor's program that is started ahead of time (`starting.prepare`): it imports what every monitor needs, and
waits until its rank begins a call."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from inprocess.monitor.starting import READY
from inprocess.system import light_torch
from inprocess.system.slow_imports import slow_imports

__all__ = ["begin", "main"]


def main(path: int, number: int) -> NoReturn:
    """The program, with the descriptors of its search path and of a socket to the training process."""
    os.close(path)
    control = socket.socket(fileno=number)
    with slow_imports(number):
        light_torch.load()
        from inprocess.monitor import program  # noqa: F401, PLC0415
        from inprocess.stores import connecting  # noqa: F401, PLC0415
    begin(control)


def begin(control: socket.socket) -> NoReturn:
    """All that a monitor needs is imported: wait for its rank."""
    from inprocess.monitor import program  # noqa: PLC0415  (slowly)

    control.send(READY)
    _, found, _, _ = socket.recv_fds(control, len(READY), 6)
    control.close()
    if len(found) < 5:
        os._exit(0)  # the training process has ended, or does without
    *given, errors = found
    os.dup2(errors, 2)
    os.close(errors)
    program.main(*[*given, -1][:5])
