"""Hosts and ports on a command line, and in what comes from elsewhere. Pure."""

from __future__ import annotations

__all__ = ["LOOPBACK", "MAX_PORT", "connect_address", "is_port", "listen_address"]

#: where a program listens unless it is told otherwise
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def is_port(text: str, lowest: int = 1) -> bool:
    """Whether it is the number of one, and none below ``lowest``."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and lowest <= int(text) <= MAX_PORT


def listen_address(text: str) -> tuple[str, int]:
    """``[HOST:]PORT`` as (host, port); an IPv6 address in brackets. Raises ValueError, which says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not is_port(port, 0):
        raise ValueError(f"{port!r} is no port: pass [HOST:]PORT with a port from 0 to {MAX_PORT}, such as 9464")
    return (_host(host, port) if colon else LOOPBACK), int(port)


def connect_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` as (host, port); the same where something listens."""
    host, _, port = text.rpartition(":")
    if not is_port(port):
        raise ValueError(f"{port!r} is no port: pass HOST:PORT with a port from 1 to {MAX_PORT}, such as 9464")
    return _host(host, port), int(port)


def _host(host: str, port: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{host!r} is no host: put an IPv6 address in brackets, such as [::1]:{port}")
    if not host or any(letter.isspace() for letter in host):
        raise ValueError(f"{host!r} is no host: pass PORT alone for {LOOPBACK}, or HOST:PORT")
    return host
