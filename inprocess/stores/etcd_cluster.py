"""One connection to an etcd cluster: transactions, leases and watches, sent to whichever endpoint answers.

The client library, the extra ``[etcd]``, is imported when a connection is made. A question is put again until
``patience`` is over, whether an endpoint refuses, resets, is silent or has no leader: it may be about to start again.
The one before may have been carried out, since an endpoint can die between that and its answer: who asks makes twice
the same as once.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import os
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from inprocess.exception import OptionError
from inprocess.stores.connections import shut
from inprocess.system import clock

__all__ = ["Cluster", "Done", "Expired", "Found", "delete", "is_value", "is_version", "put", "range_of", "raw"]

#: how long it takes at most to notice that an endpoint does not accept connections (seconds)
CONNECT_TIMEOUT_S = 2.0
#: how long an answer is waited for until another endpoint is asked (seconds); one without a leader may never answer
ANSWER_TIMEOUT_S = 2.0
#: pause before all endpoints are tried once more (seconds): first, and at most; each is twice as long as the one before
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4
#: gRPC's codes of a server that starts, stops or elects a leader: cancelled, deadline exceeded, unavailable
PASSING = frozenset({1, 4, 14})


class Expired(RuntimeError):
    """The generation is no more."""


# --- what etcd is told, and answers -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    value: bytes
    #: how often it was set
    version: int
    key: str = ""

    @classmethod
    def of(cls, pair: dict[str, Any]) -> Found:
        return cls(
            base64.b64decode(pair.get("value", "")),
            int(pair.get("version", 0)),
            base64.b64decode(pair.get("key", "")).decode(),
        )


@dataclasses.dataclass(frozen=True)
class Done:
    """What a transaction answered."""

    succeeded: bool
    #: of the whole store
    revision: int
    #: for each operation the key that was found (or deleted), or None
    answers: list[Found | None]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Done:
        answers = [cls._first(response) for response in answer.get("responses", ())]
        return cls(bool(answer.get("succeeded")), int(answer["header"]["revision"]), answers)

    @staticmethod
    def _first(response: dict[str, Any]) -> Found | None:
        (kind,) = (response[name] or {} for name in response)
        if int(kind.get("deleted", 0)):
            return Found(b"", 0)
        pairs = kind.get("kvs") or ()
        return Found.of(pairs[0]) if pairs else None


def raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def encode(text: str | bytes) -> str:
    return base64.b64encode(raw(text)).decode()


def _below(start: str) -> dict[str, str]:
    """Every key that begins with ``start`` (which does not end with the last of all characters)."""
    first = raw(start)
    return {"key": encode(first), "range_end": encode(first[:-1] + bytes([first[-1] + 1]))}


def is_value(place: str, value: bytes) -> dict[str, Any]:
    """A comparison: the key holds ``value``; empty: it is absent."""
    if value:
        return {"key": encode(place), "target": "VALUE", "result": "EQUAL", "value": encode(value)}
    return {"key": encode(place), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def is_version(place: str, version: int) -> dict[str, Any]:
    return {"key": encode(place), "target": "VERSION", "result": "EQUAL", "version": str(version)}


def put(place: str, value: bytes, lease: str) -> dict[str, Any]:
    return {"request_put": {"key": encode(place), "value": encode(value), "lease": lease}}


def range_of(place: str) -> dict[str, Any]:
    return {"request_range": {"key": encode(place)}}


def delete(place: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": encode(place)}}


# --- the cluster --------------------------------------------------------------------------------------------------


class Cluster:
    """One connection to a cluster: to the endpoint that answered last, and on from there where it does not."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        patience: float,
        login: tuple[str, str],
        ca_cert: str,
        certificate: tuple[str, str],
    ) -> None:
        self._library = _Library()
        self._login, self.patience = login, patience
        verify, cert = ca_cert or True, certificate if any(certificate) else None
        self._clients = [self._client(endpoint, verify, cert) for endpoint in _endpoints(endpoints)]
        # not all ranks ask the same one
        self._current = os.getpid() % len(self._clients)
        self._gone = threading.Event()
        # protects the descriptor of the watch that goes on: it is shut down from other threads
        self._lock = threading.Lock()
        self._watching: int | None = None

    def _client(self, endpoint: urllib.parse.SplitResult, verify: str | bool, cert: tuple[str, str] | None) -> Any:
        session = self._library.requests.Session()
        session.trust_env = False  # no proxy between a job and its store, no passwords of other programs
        session.verify, session.cert = verify, cert
        return self._library.Etcd3Client(
            endpoint.hostname,
            endpoint.port or 2379,
            protocol=endpoint.scheme,
            timeout=(min(CONNECT_TIMEOUT_S, self.patience), max(min(ANSWER_TIMEOUT_S, self.patience / 2), 0.1)),
            api_path="/v3/",
            session=session,
        )

    def cut(self) -> None:
        with self._lock:
            self._gone.set()
            if self._watching is not None:
                shut(self._watching)

    # --- asking -------------------------------------------------------------------------------------------------

    def transact(self, compare: list[Any], success: list[Any], failure: Iterable[Any] = ()) -> Done:
        return Done.of(self._send(compare, success, failure))

    def below(self, start: str, keys_only: bool = False) -> list[Found]:
        """Every key that begins so."""
        answer = self._send([], [{"request_range": _below(start) | {"keys_only": keys_only}}], ())
        return [Found.of(pair) for pair in answer["responses"][0]["response_range"].get("kvs", ())]

    def _send(self, compare: list[Any], success: list[Any], failure: Iterable[Any]) -> dict[str, Any]:
        payload = {"compare": compare, "success": success, "failure": list(failure)}
        return self.ask(lambda client: client.transaction(payload))  # type: ignore[no-any-return]

    def grant(self, ttl: int) -> str:
        """A new lease of so many seconds."""
        return str(self.ask(lambda client: client.lease(ttl)).id)

    def renew(self, lease: str) -> bool:
        """False: it has run out."""
        return int(self.ask(lambda client: self._library.Lease(int(lease), client).refresh())) > 0

    def revoke(self, lease: str) -> None:
        """End it, with all keys that are tied to it. Raises Expired where it has ended."""
        self.ask(lambda client: self._library.Lease(int(lease), client).revoke())

    def ask(self, question: Any) -> Any:
        """Put a question to one endpoint after the other until one answers, for ``patience`` seconds.

        Raises Expired, or RuntimeError where none answers.
        """
        deadline, pause, tries, login = clock.monotonic() + self.patience, FIRST_PAUSE_S, 0, False
        while True:
            self._refuse_cut()
            client = self._clients[self._current]
            try:
                if login:
                    self._authenticate(client)
                return question(client)
            except self._library.ERRORS as error:
                if not self._library.may_pass(error):
                    if login or not self._wants_login(error):
                        raise _told(error) from None
                    login = True
                    continue
                self._give_up_at(deadline, error)
            tries += 1
            self._current = (self._current + 1) % len(self._clients)
            if tries % len(self._clients) == 0:
                self._gone.wait(min(pause, max(0.0, deadline - clock.monotonic())))
                pause = min(2 * pause, MAX_PAUSE_S)

    def _refuse_cut(self) -> None:
        if self._gone.is_set():
            raise RuntimeError("this connection was cut, as the call has ended")

    def _give_up_at(self, deadline: float, error: Any) -> None:
        if clock.monotonic() >= deadline:
            raise RuntimeError(
                f"no endpoint of etcd answers ({self._names()}) within {self.patience:g} s (patience): {_reason(error)}"
            ) from None

    def _names(self) -> str:
        return ", ".join(client.base_url for client in self._clients)

    def _wants_login(self, error: Any) -> bool:
        """Whether the server wants to know who asks, or has forgotten it, and there is an answer to that."""
        return all(self._login) and any(word in _text(error) for word in ("user name is empty", "invalid auth token"))

    def _authenticate(self, client: Any) -> None:
        user, password = self._login
        client.session.headers.pop("Authorization", None)
        try:
            answer = client.post(client.get_url("/auth/authenticate"), json={"name": user, "password": password})
        except self._library.ERRORS as refusal:
            if self._library.may_pass(refusal):
                raise
            raise RuntimeError(f"etcd does not let user {user!r} in: {_reason(refusal)}") from None
        client.session.headers["Authorization"] = answer["token"]

    # --- watching -----------------------------------------------------------------------------------------------

    def watch(self, place: str, revision: int, seconds: float, below: bool = False) -> bytes | None:
        """Wait until something happens to a key (or to one that begins so) at this revision or later; its value, empty
        where it was deleted. None: nothing within ``seconds``, or the watch ended for another reason; look, and begin
        again."""
        self._refuse_cut()
        client, begun = self._clients[self._current], clock.monotonic()
        request = (_below(place) if below else {"key": encode(place)}) | {"start_revision": str(revision)}
        try:
            with client.session.post(
                client.get_url("/watch"),
                json={"create_request": request},
                stream=True,
                timeout=(min(CONNECT_TIMEOUT_S, self.patience), max(seconds, 0.001)),
            ) as response:
                value = self._first_event(response)
        except self._library.requests.RequestException:
            value = None
        if value is None and clock.monotonic() - begun < seconds:
            self._gone.wait(min(FIRST_PAUSE_S, seconds))  # it was refused, or the endpoint has gone
        return value

    def _first_event(self, response: Any) -> bytes | None:
        with self._lock:
            self._refuse_cut()
            self._watching = response.raw.fileno()
        try:
            for result in _messages(response):
                if result is None or result.get("canceled"):
                    return None
                if result.get("events"):
                    return Found.of(result["events"][0]["kv"]).value
        finally:
            with self._lock:
                self._watching = None
        return None


def _messages(response: Any) -> Iterator[dict[str, Any] | None]:
    """What a watch tells, as it comes: one line each; None for an error."""
    rest = b""
    for chunk in response.iter_content(chunk_size=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line).get("result") for line in lines if line.strip())


class _Library:
    """What is used of the client library."""

    def __init__(self) -> None:
        try:
            client = importlib.import_module("etcd3gw.client")
            errors = importlib.import_module("etcd3gw.exceptions")
            self.requests = importlib.import_module("requests")
        except ImportError as error:
            raise OptionError(
                f"EtcdStore needs the package etcd3gw ({error}): pip install 'inprocess[etcd]' on every host"
            ) from None
        self.Etcd3Client, self.Lease = client.Etcd3Client, client.Lease
        self._no_answer = (errors.ConnectionFailedError, errors.ConnectionTimeoutError)
        #: the second is an answer that breaks off: the client library does not translate it
        self.ERRORS = (errors.Etcd3Exception, self.requests.RequestException)

    def may_pass(self, error: Any) -> bool:
        """Whether the same question may be answered later, or by another endpoint."""
        silent = isinstance(error, (*self._no_answer, self.requests.RequestException))
        return silent or _code(error) in PASSING


def _code(error: Any) -> int | None:
    """gRPC's code in the answer of the gateway; the HTTP status that goes with it depends on etcd's version."""
    try:
        answer = json.loads(error.detail_text or "")
    except ValueError:
        return None
    return answer.get("code") if isinstance(answer, dict) else None


def _endpoints(given: str | Sequence[str]) -> list[urllib.parse.SplitResult]:
    texts = given.split(",") if isinstance(given, str) else list(given)
    if not texts:
        raise OptionError("EtcdStore: endpoints is empty: name at least one, such as 'http://10.0.0.1:2379'")
    found = [_endpoint(text) for text in texts]
    if None in found:
        raise OptionError(f"EtcdStore: endpoints={given!r} must be addresses such as 'http://10.0.0.1:2379'")
    return [each for each in found if each is not None]


def _endpoint(text: str) -> urllib.parse.SplitResult | None:
    try:
        word = text.strip()
        parts = urllib.parse.urlsplit(word if "://" in word else f"http://{word}")
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except (ValueError, AttributeError):  # a port that is no number; no text at all
        return None
    return parts if good else None


def _text(error: Any) -> str:
    return f"{getattr(error, 'detail_text', '') or ''} {error}".strip()


def _reason(error: Any) -> str:
    """In one line. None of these is a wait that has ended, for which the driver takes what speaks of a timeout."""
    line = " ".join(_text(error).split())
    line = (line.partition("(Caused by ")[2] or line)[:300]
    for word, other in (("timed out", "took too long"), ("timeout", "time limit"), ("Timeout", "TimeLimit")):
        line = line.replace(word, other)
    return line or type(error).__name__


def _told(error: Any) -> RuntimeError:
    if "lease not found" in _text(error):
        return Expired("the keys of this job have expired: none of its processes used them within ttl")
    return RuntimeError(f"etcd refuses it: {_reason(error)}")
