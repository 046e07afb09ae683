"""Clients that no server expects: silent, slow, gone at once, talking nonsense, or asking and never reading."""

from __future__ import annotations

import contextlib
import socket
import struct

__all__ = ["GARBAGE", "surround"]

#: for a connection (seconds)
SOON = 20.0
GARBAGE = [
    b"\x00\xff" * 3000,
    b"[" * 3000,
    b"GET / HTTP/1.1\r\nA: " + b"x" * 30_000,
    b"\n" * 5000,
    b"\x16\x03\x01\x02\x00",
    b"POST / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b'{"hello": true, "key": null, "n": 1}\n',
    b'{"vote": {}, "n": 1}\n{"ping": 1, "n": 2}\n',
]


def surround(stack: contextlib.ExitStack, where: tuple[str, int], asks: str = "") -> None:
    """One of each kind comes to a server and stays, if it may, until the stack is unwound; ``asks``: headers."""

    def comes(*options: tuple[int, int, int | bytes]) -> socket.socket:
        made = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET))
        for option in options:
            made.setsockopt(*option)
        made.settimeout(SOON)
        made.connect(where)
        return made

    comes()  # silent
    comes().sendall(b"GET /met")  # slow: the rest does not come
    reset = comes((socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)))
    reset.sendall(b"GET / HTTP/1.0\r\n")
    reset.close()
    for said in GARBAGE:
        with contextlib.suppress(OSError):  # it has been sent away
            comes().sendall(said)
    insatiable = comes((socket.SOL_SOCKET, socket.SO_RCVBUF, 4096))
    insatiable.setblocking(False)
    with contextlib.suppress(OSError):  # nothing more goes in, or it has been sent away
        for _ in range(1000):
            insatiable.send(b'{"ping": 1, "n": 2}\n' * 1000)
    for path in ("/", "/metrics", "/status"):
        comes((socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)).sendall(f"GET {path} HTTP/1.0\r\n{asks}\r\n".encode())
