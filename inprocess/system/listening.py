"""Where a program is told to listen."""

from __future__ import annotations

__all__ = ["LOOPBACK", "listen_address"]

#: where it listens unless it is told otherwise
LOOPBACK = "127.0.0.1"


def listen_address(text: str) -> tuple[str, int]:
    """``[HOST:]PORT`` as (host, port); an IPv6 address in brackets. Raises ValueError, which says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"{port!r} is no port: pass [HOST:]PORT with a port from 0 to 65535, such as 9464")
    if not colon:
        return LOOPBACK, int(port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{host!r} is no host: put an IPv6 address in brackets, such as [::1]:{port}")
    if not host or any(letter.isspace() for letter in host):
        raise ValueError(f"{host!r} is no host: pass PORT alone for {LOOPBACK}, or HOST:PORT")
    return host, int(port)
