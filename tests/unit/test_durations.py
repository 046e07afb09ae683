"""Any duration that an option takes can be waited for."""

from __future__ import annotations

import os
import select
import socket

import pytest

from inprocess.options import MAX_DURATION_S
from inprocess.stores import connections
from inprocess.system import descriptors


@pytest.mark.parametrize("seconds", [MAX_DURATION_S, 30 * 86_400.0, 2**31 / 1e3])
def test_poll_takes_it(seconds: float) -> None:
    assert 24 * 86_400e3 < descriptors.milliseconds(seconds) <= 2**31 - 1
    readable = os.eventfd(1)
    try:
        assert descriptors.await_readable(readable, seconds)
        poll = select.poll()
        poll.register(readable, select.POLLIN)
        assert poll.poll(descriptors.milliseconds(seconds))
    finally:
        os.close(readable)


def test_what_is_over_is_not_waited_for() -> None:
    assert descriptors.milliseconds(-1.0) == 0.0
    assert descriptors.milliseconds(0.0005) == 0.5


@pytest.mark.parametrize("seconds", [30.0, MAX_DURATION_S])
def test_the_kernel_takes_it(seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connections.limit_silence(*server.getsockname(), seconds)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == min(int(seconds / 3), 32_767)
        assert client.getsockopt(socket.IPPROTO_TCP, connections.TCP_THIN_LINEAR_TIMEOUTS)
