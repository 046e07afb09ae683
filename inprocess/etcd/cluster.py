"""One connection to an etcd cluster: transactions, leases and watches, sent to whichever endpoint answers.

A question is put again until ``patience`` is over, whether an endpoint refuses, resets, is silent or has no leader: it
may be about to start again. The one before may have been carried out, since an endpoint can die between that and its
answer: who asks makes twice the same as once.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

from inprocess.etcd.gateway import NO_ANSWER, Gateway, Refused, Stream
from inprocess.exception import OptionError
from inprocess.stores.connections import shut
from inprocess.system import clock
from inprocess.system.listening import MAX_PORT

__all__ = [
    "Cluster",
    "Done",
    "Expired",
    "Found",
    "delete",
    "is_unchanged",
    "is_value",
    "is_version",
    "otherwise",
    "put",
    "range_of",
    "raw",
]

#: how long it takes at most to notice that an endpoint does not accept connections (seconds)
CONNECT_TIMEOUT_S = 2.0
#: how long an answer is waited for until another endpoint is asked (seconds); one without a leader may never answer
ANSWER_TIMEOUT_S = 2.0
#: pause before all endpoints are tried once more (seconds): first, and at most; each is twice as long as the one before
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4
#: how often etcd serves watches that begin in the past (seconds); first pause between looks meanwhile, then doubled
CATCHING_UP_S, FIRST_LOOK_S = 0.1, 0.01
#: gRPC's codes of a server that starts, stops or elects a leader: cancelled, deadline exceeded, unavailable
PASSING = frozenset({1, 4, 14})
#: HTTP's, of a proxy that has no endpoint, or too much to do
PASSING_STATUS = frozenset({429, 502, 503, 504})
#: a user or a role has changed since the token was given; once more where a member lags behind
OLD_TOKEN = "revision of auth store is old"
#: what a server says that wants to know who asks
LOGIN_WORDS = ("user name is empty", "invalid auth token", OLD_TOKEN)


class Expired(RuntimeError):
    """The generation is no more."""

    def __init__(
        self, text: str = "the keys of this job have expired: none of its processes used them within ttl"
    ) -> None:
        super().__init__(text)


# --- what etcd is told, and answers -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    value: bytes
    #: how often it was set since it is there
    version: int
    #: the revision of the store at which it was set last
    changed: int = 0
    key: str = ""

    @classmethod
    def of(cls, pair: dict[str, Any]) -> Found:
        return cls(
            base64.b64decode(pair.get("value", "")),
            int(pair.get("version", 0)),
            int(pair.get("mod_revision", 0)),
            base64.b64decode(pair.get("key", "")).decode(),
        )


@dataclasses.dataclass(frozen=True)
class Done:
    """What a transaction answered, together with the transactions that it has inside."""

    #: it, or one inside
    succeeded: bool
    #: of the whole store
    revision: int
    #: for each operation the key that was found (or deleted), or None
    answers: list[Found | None]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Done:
        return cls(cls._succeeded(answer), int(answer["header"]["revision"]), cls._answers(answer))

    @classmethod
    def _succeeded(cls, answer: dict[str, Any]) -> bool:
        inner = [response["response_txn"] for response in answer.get("responses", ()) if "response_txn" in response]
        return bool(answer.get("succeeded")) or any(cls._succeeded(each) for each in inner)

    @classmethod
    def _answers(cls, answer: dict[str, Any]) -> list[Found | None]:
        found: list[Found | None] = []
        for response in answer.get("responses", ()):
            inner = response.get("response_txn")
            found += [cls._first(response)] if inner is None else cls._answers(inner)
        return found

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


def is_unchanged(place: str, since: Found | None) -> dict[str, Any]:
    changed = 0 if since is None else since.changed
    return {"key": encode(place), "target": "MOD", "result": "EQUAL", "mod_revision": str(changed)}


def put(place: str, value: bytes, lease: str) -> dict[str, Any]:
    return {"request_put": {"key": encode(place), "value": encode(value), "lease": lease}}


def range_of(place: str, revision: int = 0) -> dict[str, Any]:
    """``revision``: as it was then; 0: as it is."""
    return {"request_range": {"key": encode(place), "revision": str(revision)}}


def otherwise(compare: list[Any], success: list[Any], failure: list[Any]) -> dict[str, Any]:
    """A transaction inside another one."""
    return {"request_txn": {"compare": compare, "success": success, "failure": failure}}


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
        self._login, self.patience = login, patience
        addresses = _endpoints(endpoints)
        secure = any(address.scheme == "https" for address in addresses)
        if not secure and any((ca_cert, *certificate)):
            cert, key = certificate
            raise OptionError(
                f"EtcdStore: ca_cert={ca_cert!r}, cert={cert!r} and key={key!r} are for https, and no address of "
                f"endpoints={endpoints!r} begins so: write 'https://...', or leave them out"
            )
        tls = _Files(ca_cert, certificate).context if secure else None
        limits = min(CONNECT_TIMEOUT_S, patience), max(min(ANSWER_TIMEOUT_S, patience / 2), 0.1)
        self._members = [Gateway(address, *limits, tls if address.scheme == "https" else None) for address in addresses]
        # not all ranks ask the same one
        self._current = os.getpid() % len(self._members)
        self._gone = threading.Event()
        # protects the descriptor of the watch that goes on: it is shut down from other threads
        self._lock = threading.Lock()
        self._watching: int | None = None

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
        return self.ask("/kv/txn", payload)  # type: ignore[no-any-return]

    def grant(self, ttl: int) -> str:
        """A new lease of so many seconds."""
        return str(self.ask("/lease/grant", {"TTL": ttl, "ID": 0})["ID"])

    def renew(self, lease: str) -> bool:
        """False: it has run out."""
        return int(self.ask("/lease/keepalive", {"ID": lease})["result"].get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """End it, with all keys that are tied to it. Raises Expired where it has ended."""
        self.ask("/kv/lease/revoke", {"ID": lease})

    def ask(self, path: str, question: Any) -> Any:
        """Put a question to one endpoint after the other until one answers, for ``patience`` seconds.

        Raises Expired, or RuntimeError where none answers.
        """
        deadline, pause, tries, login = clock.monotonic() + self.patience, FIRST_PAUSE_S, 0, False
        while True:
            self._refuse_cut()
            member = self._members[self._current]
            try:
                if login:
                    self._authenticate(member)
                return member.post(path, question)
            except (Refused, *NO_ANSWER) as error:
                if not login and self._wants_login(error):
                    login = True
                    continue
                if not _may_pass(error) and not (login and OLD_TOKEN in str(error)):
                    raise _told(error) from None
                self._give_up_at(deadline, error)
            tries += 1
            self._current = (self._current + 1) % len(self._members)
            if tries % len(self._members) == 0:
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
        return ", ".join(member.name for member in self._members)

    def _wants_login(self, error: Any) -> bool:
        """Whether the server wants to know who asks, or has forgotten it, and there is an answer to that."""
        return all(self._login) and any(word in str(error) for word in LOGIN_WORDS)

    def _authenticate(self, member: Gateway) -> None:
        user, password = self._login
        member.token = ""
        try:
            answer = member.post("/auth/authenticate", {"name": user, "password": password})
        except Refused as refusal:
            if _may_pass(refusal):
                raise
            raise RuntimeError(f"etcd does not let user {user!r} in: {_reason(refusal)}") from None
        member.token = answer["token"]

    # --- watching -----------------------------------------------------------------------------------------------

    def watch(self, place: str, since: int, seconds: float) -> Found | None:
        """Wait until a key is set that was absent at revision ``since``. None: it was not within ``seconds``, or the
        watch ended for another reason; look, and begin again.

        It begins now, not at ``since``: etcd serves a watch that begins in the past ten times a second. So the key is
        read once more when the watch has begun.
        """
        return self._watch({"key": encode(place)}, since, seconds, place)

    def watch_below(self, start: str, since: int, seconds: float) -> Found | None:
        """The same for whatever happens, after that revision, to keys that begin so; a tenth of a second late."""
        return self._watch(_below(start) | {"start_revision": str(since + 1)}, since, seconds)

    def _watch(self, request: dict[str, str], since: int, seconds: float, place: str = "") -> Found | None:
        self._refuse_cut()
        member, begun = self._members[self._current], clock.monotonic()
        found = None
        try:
            with member.stream("/watch", {"create_request": request}, seconds, self._note_watch) as results:
                found = self._first_event(results, since, place)
        except NO_ANSWER:
            pass
        if found is None and clock.monotonic() - begun < seconds:
            self._gone.wait(min(FIRST_PAUSE_S, seconds))  # it was refused, or the endpoint has gone
        return found

    def _note_watch(self, connection: socket.socket | None) -> None:
        with self._lock:
            self._watching = None if connection is None else connection.fileno()
            if connection is not None:
                self._refuse_cut()

    def _first_event(self, stream: Stream, since: int, place: str) -> Found | None:
        for each in stream:
            result = each.get("result")
            if result is None or result.get("canceled"):
                return None
            if place and result.get("created"):
                found = self._read_again(place, int(result["header"]["revision"]), stream)
                if found is not None:
                    return found
            for event in result.get("events", ()):
                found = Found.of(event["kv"])
                if found.changed > since:  # a member that lags behind tells of what was before
                    return found
        return None

    def _read_again(self, place: str, begun: int, stream: Stream) -> Found | None:
        """What was written before the watch had begun, at this revision.

        A write that overtook it puts it among those that begin in the past: then it is looked until it has caught up.
        """
        until, pause = clock.monotonic() + CATCHING_UP_S, FIRST_LOOK_S
        while True:
            done = self.transact([], [range_of(place)])
            (found,) = done.answers
            if found is not None or done.revision == begun:
                return found
            if clock.monotonic() >= until or stream.comes_within(pause):
                return None
            pause *= 2


def _may_pass(error: Exception) -> bool:
    """Whether the same question may be answered later, or by another endpoint."""
    if not isinstance(error, Refused):
        return True
    return error.status in PASSING_STATUS if error.code is None else error.code in PASSING


class _Files:
    """The files by which servers are judged, and this client is; read again where they have changed.

    Certificates that are made for some hours are replaced while the job runs.
    """

    def __init__(self, ca_cert: str, certificate: tuple[str, str]) -> None:
        self._ca_cert, self._certificate = ca_cert, certificate
        self._seen, self._context = self._changed(), _tls(ca_cert, certificate)

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        changed = self._changed()
        if changed != self._seen:
            with contextlib.suppress(OptionError):  # they are just being written, one after the other
                self._context, self._seen = _tls(self._ca_cert, self._certificate), changed
        return self._context

    def _changed(self) -> list[int]:
        try:
            return [os.stat(path).st_mtime_ns for path in (self._ca_cert, *self._certificate) if path]
        except OSError:
            return []


def _tls(ca_cert: str, certificate: tuple[str, str]) -> ssl.SSLContext:
    cert, key = certificate
    try:
        context = ssl.create_default_context(cafile=ca_cert or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"EtcdStore: ca_cert={ca_cert!r}, cert={cert!r} and key={key!r} cannot be used: {error}. They are paths of "
            "files in PEM format"
        ) from None
    return context


def _endpoints(given: str | Sequence[str]) -> list[urllib.parse.SplitResult]:
    texts = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not texts:
        raise OptionError("EtcdStore: endpoints is empty: name at least one, such as 'http://10.0.0.1:2379'")
    found = [_endpoint(text) for text in texts]
    if None in found:
        wrong = texts[found.index(None)]
        raise OptionError(
            f"EtcdStore: endpoints={given!r} must be addresses such as 'http://10.0.0.1:2379', without a path, with "
            f"ports from 1 to {MAX_PORT}, and {wrong!r} is none"
        )
    return [each for each in found if each is not None]


def _endpoint(text: object) -> urllib.parse.SplitResult | None:
    if not isinstance(text, str):
        return None
    try:
        word = text.strip()
        parts = urllib.parse.urlsplit(word if "://" in word else f"http://{word}")
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        return None
    if "@" in parts.netloc:  # which is not shown: there may be a password in it
        raise OptionError("EtcdStore: endpoints has a name before an address: it goes into user=... and password=...")
    return parts if good and not (parts.path.strip("/") or parts.query or parts.fragment) else None


def _reason(error: Exception) -> str:
    """In one line. None of these is a wait that has ended, for which the driver takes what speaks of a timeout."""
    line = " ".join(str(error).split())[:300]
    for word, other in (("timed out", "took too long"), ("timeout", "time limit"), ("Timeout", "TimeLimit")):
        line = line.replace(word, other)
    return line or type(error).__name__


def _told(error: Exception) -> RuntimeError:
    if "lease not found" in str(error):
        return Expired()
    return RuntimeError(f"etcd refuses it: {_reason(error)}")
