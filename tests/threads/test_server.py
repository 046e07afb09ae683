"""A server that waits for nobody, with clients of every kind over real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from inprocess.system import server as system_server
from inprocess.system.http_server import MAX_REQUEST_BYTES, Exchange, HttpServer
from tests.harness import strangers

#: a ceiling, not a duration (seconds)
SOON = 20.0
MUCH = 1 << 25


class Answer(Exchange):
    def do_GET(self) -> None:
        if self.path == "/error":
            raise ValueError("of ours")
        self.send_response(200)
        self.end_headers()
        self.is_known = self.path == "/known"
        if self.path == "/much":
            self.content = (bytes(1 << 20) for _ in range(MUCH >> 20))
        self.wfile.write(self.path.encode())


class Served(HttpServer):
    """Keeps what it says."""

    def __init__(self) -> None:
        super().__init__(socket.create_server(("127.0.0.1", 0)), "inprocess-test", Answer)
        self.where = ("127.0.0.1", self.port)
        self.said: list[str] = []
        self.has_said = threading.Event()

    def say(self, text: str) -> None:
        self.said.append(text)
        self.has_said.set()

    def ask(self, path: str, **options: int) -> socket.socket:
        """A connection over which a request has been sent."""
        made = socket.create_connection(self.where, SOON)
        made.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return made


@pytest.fixture
def served(capfd: pytest.CaptureFixture[str]) -> Iterator[Served]:
    """Nothing is printed, whoever comes."""
    made = Served()
    made.start()
    yield made
    made.close()
    assert capfd.readouterr() == ("", "")


def whole(connection: socket.socket) -> bytes:
    """What comes over it until its end; then it is closed."""
    with connection:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(1 << 20):
                data += more
        return data


def test_it_answers(served: Served) -> None:
    head, _, body = whole(served.ask("/there")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n") and body == b"/there"


def test_a_long_answer_arrives_whole(served: Served) -> None:
    assert len(whole(served.ask("/much")).partition(b"\r\n\r\n")[2]) == len("/much") + MUCH


def test_who_reads_slowly_keeps_nobody_waiting(served: Served) -> None:
    with served.ask("/much") as slow:
        slow.recv(1)
        assert whole(served.ask("/there")).endswith(b"/there")


@pytest.mark.parametrize("said", strangers.GARBAGE, ids=range(len(strangers.GARBAGE)))
def test_garbage(served: Served, said: bytes) -> None:
    with socket.create_connection(served.where, SOON) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        assert b"200 OK" not in whole(stranger)
    assert whole(served.ask("/there")).endswith(b"/there") and not served.said


def test_a_request_without_an_end(served: Served) -> None:
    with socket.create_connection(served.where, SOON) as stranger, contextlib.suppress(OSError):
        stranger.sendall(b"GET / HTTP/1.0\r\nA: " + bytes(MAX_REQUEST_BYTES))
        assert stranger.recv(1) == b""


def test_who_says_nothing_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who says a little now and then: seventeen lines of traceback each, before."""
    monkeypatch.setattr(system_server, "STRANGER_S", 0.05)
    with socket.create_connection(served.where, SOON) as silent, socket.create_connection(served.where, SOON) as slow:
        slow.sendall(b"GET /th")
        assert (silent.recv(1), slow.recv(1)) == (b"", b"")


def test_who_takes_no_answer_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_server, "STRANGER_S", 0.05)
    slow = served.ask("/much")
    while served.clients or not slow.recv(1):  # closed by the server, which nothing tells
        pass
    assert len(whole(slow)) < MUCH


def test_an_error_of_ours_ends_one_connection(served: Served) -> None:
    assert whole(served.ask("/error")) == b""
    assert served.said == ["a client was closed after an error: ValueError: of ours"]
    assert whole(served.ask("/there")).endswith(b"/there")


def test_without_descriptors_the_oldest_stranger_goes(served: Served) -> None:
    """What is needed is said once. The limit is that of this process, lowered to what is open just now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gone = threading.Event()
    served.left = lambda client: gone.set()
    with socket.create_connection(served.where, SOON) as old:
        assert whole(served.ask("/there"))  # by now the old one has been accepted
        assert gone.wait(SOON)  # and that of the request has been closed
        # not before: the descriptor of the old one is to lie below the limit, so that another one can have it
        with socket.socket() as new:
            lowest = os.dup(new.fileno())
            os.close(lowest)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
                new.settimeout(SOON)
                new.connect(served.where)
                new.sendall(b"GET /there HTTP/1.0\r\n\r\n")
                assert old.recv(1) == b""
                assert new.recv(100)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (said,) = served.said
    assert "nobody can connect: too many open files" in said and "ulimit -n" in said


def test_one_that_was_never_started_leaves_nothing() -> None:
    made = Served()
    made.close()
    made.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(made.where, SOON)
