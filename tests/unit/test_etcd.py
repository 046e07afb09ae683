"""What a cluster of etcd is asked again, and what is final, without a cluster: tests/contracts has a real one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.etcd import cluster as module
from inprocess.etcd.cluster import Cluster
from inprocess.etcd.gateway import Gateway

PAGE = "<html><body><h1>Service Unavailable</h1></body></html>"
#: as grpc-gateway nests it where the answer would have been a stream
NESTED = (
    '{"error":{"grpc_code":%d,"http_code":503,"message":"transport is closing","http_status":"Service Unavailable"}}'
)
OLD = '{"error":"etcdserver: revision of auth store is old","code":3}'


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Has a gateway give these answers, (status, text), one after the other; returns the paths that were asked."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)

    def answers(*given: tuple[int, str]) -> list[str]:
        left, asked = list(given), []

        def send(gateway: Gateway, connection: Any, path: str, body: Any, seconds: float) -> Any:
            asked.append(path)
            status, text = left.pop(0)
            return SimpleNamespace(status=status, read=text.encode)

        kept = SimpleNamespace(sock=None, close=lambda: None)
        monkeypatch.setattr(Gateway, "_connect", lambda gateway: kept)
        monkeypatch.setattr(Gateway, "_send", send)
        monkeypatch.setattr("inprocess.etcd.gateway._has_ended", lambda connection: False)
        return asked

    return answers


def connection(user: str = "", password: str = "") -> Cluster:
    return Cluster("http://10.0.0.1:2379", 20.0, (user, password), "", ("", ""))


@pytest.mark.parametrize("code", [1, 4, 14])
def test_a_renewal_that_a_stopping_server_refuses_is_asked_again(answers: Callable[..., Any], code: int) -> None:
    """The server that was asked, or its client of itself, ends: another one answers."""
    asked = answers((500, NESTED % code), (200, '{"result":{"TTL":"60"}}'))  # the status is not what counts
    assert connection().renew("7")
    assert len(asked) == 2


@pytest.mark.parametrize("text", [NESTED % 3, NESTED % 99, '{"error":{"message":"no code"}}', '{"error":null}', "[14]"])
def test_any_other_refusal_is_final(answers: Callable[..., Any], text: str) -> None:
    answers((400, text))
    with pytest.raises(RuntimeError, match="etcd refuses it"):
        connection().renew("7")


@pytest.mark.parametrize("text", [PAGE, "", '{"code":503}'], ids=["page", "nothing", "json"])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_proxy_that_has_no_server_for_the_moment(answers: Callable[..., Any], status: int, text: str) -> None:
    asked = answers((status, text), (200, "{}"))
    assert connection().ask("/kv/txn", {}) == {}
    assert len(asked) == 2


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_proxy_that_will_not(answers: Callable[..., Any], status: int) -> None:
    answers((status, ""))
    with pytest.raises(RuntimeError, match=f"HTTP status {status}"):
        connection().ask("/kv/txn", {})


def test_a_code_of_etcd_counts_before_the_status(answers: Callable[..., Any]) -> None:
    answers((503, '{"error":"etcdserver: no space","code":8}'))
    with pytest.raises(RuntimeError, match="no space"):
        connection().ask("/kv/txn", {})


def test_a_token_from_before_a_change_of_users(answers: Callable[..., Any]) -> None:
    """The member that gave the new one may lag behind the one that is asked, or somebody changes another user."""
    token = (200, '{"token":"t"}')
    asked = answers((400, OLD), token, (400, OLD), token, (200, "{}"))
    assert connection("root", "secret").ask("/kv/txn", {}) == {}
    assert asked == ["/kv/txn", "/auth/authenticate", "/kv/txn", "/auth/authenticate", "/kv/txn"]


def test_who_has_no_password_cannot_renew_a_token(answers: Callable[..., Any]) -> None:
    answers((400, OLD))
    with pytest.raises(RuntimeError, match="auth store is old"):
        connection().ask("/kv/txn", {})
