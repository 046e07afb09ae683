"""Where a default group meets, as torch is told; a stand-in for torch's rendezvous. Real ranks: tests/ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.collectives.default_group import AGENT_STORE, DefaultGroups
from inprocess.system.environment import meet_at, put_back


def is_a_client(url: str, rank: int, world_size: int) -> Iterator[bool]:
    """Whether torch 2.14 and later takes it for the store of the agent, which somebody else serves."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    yield os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True" and url in ("env://", f"tcp://{address}")


@pytest.mark.parametrize("url", ["env://", "tcp://10.0.0.1:1234", "tcp://10.0.0.1:29500"])
@pytest.mark.parametrize("port", ["1234", "29500"], ids=["the iteration's port", "one that the function has set"])
def test_the_group_of_all_ranks_joins_the_iterations_store(
    url: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")
    groups, original = DefaultGroups(), is_a_client
    groups.begin_iteration(0, 2, ("10.0.0.1", 1234))
    meet_at("10.0.0.1", 1234)
    os.environ["MASTER_PORT"] = port
    (met,) = groups._meet(original, url, 0, 2)
    assert met
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "1234")


def test_a_group_of_one_process_is_never_from_before() -> None:
    """Although the job once had one rank, and this process was that."""
    groups = DefaultGroups()
    for size in (1, 2):
        groups.begin_iteration(0, size, ("10.0.0.1", 1234))
    groups._check(0, 1)


@pytest.mark.parametrize("before", [None, "True"], ids=["the first rank", "the launcher"])
@pytest.mark.parametrize("which", ["of some ranks", "beside the default one"])
def test_a_group_of_the_programs_own_meets_where_it_says(
    which: str, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There serves who would without this library: torch before 2.14 takes any address for a store of the agent."""
    for name in ("MASTER_ADDR", "MASTER_PORT", AGENT_STORE):
        monkeypatch.setenv(name, "")
    put_back({AGENT_STORE: before})
    groups = DefaultGroups()
    groups.begin()
    try:
        groups.begin_iteration(0, 4, ("10.0.0.1", 1234))
        meet_at("10.0.0.1", 1234)
        monkeypatch.setattr(dist, "is_initialized", lambda: which == "beside the default one")

        def meet(url: str, rank: int, world_size: int) -> Iterator[Any]:
            yield url, rank, world_size, os.environ.get(AGENT_STORE)

        size = 2 if which == "of some ranks" else 4
        for url, agent in (("tcp://10.0.0.1:5", before), ("tcp://10.0.0.1:1234", "True")):
            assert next(groups._meet(meet, url, 0, size)) == (url, 0, size, agent)
            assert os.environ[AGENT_STORE] == "True"
    finally:
        groups.end()


def as_given(*args: Any, **kwargs: Any) -> Any:
    """Stands for torch's functions: the first two of what one returns or yields."""
    return iter((args, kwargs))


@pytest.mark.parametrize("when", ["there is a default group", "the call is over"])
@pytest.mark.parametrize("place", [(1, 2), (1, 3)], ids=["the iteration's place", "one from before"])
def test_what_cannot_be_a_default_group_is_left_as_it_is(
    place: tuple[int, int], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework's own group beside it; or a function that a module has imported from torch during the call."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    groups, (rank, size) = DefaultGroups(), place
    groups.begin_iteration(1, 3, ("10.0.0.1", 1233))
    groups.begin_iteration(1, 2, ("10.0.0.1", 1234))
    if when == "the call is over":
        groups.end()
    else:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for _ in range(2):
        assert [*groups._meet(as_given, "tcp://10.0.0.9:5", rank, size, timeout=1)] == [
            ("tcp://10.0.0.9:5", rank, size),
            {"timeout": 1},
        ]
        assert [*groups._make(as_given, size, rank, [], "gloo", "store", "name", timeout=1)] == [
            (size, rank, [], "gloo", "store", "name"),
            {"timeout": 1},
        ]
    assert os.environ["MASTER_PORT"] == "29500"


def test_a_function_that_was_imported_during_a_call_serves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")
    groups = DefaultGroups()
    groups.begin()
    groups.end()
    groups.begin()
    try:
        groups.begin_iteration(0, 2, ("10.0.0.1", 1234))
        (met,) = groups._meet(is_a_client, "tcp://10.0.0.9:5", 0, 2)
        assert met
    finally:
        groups.end()
