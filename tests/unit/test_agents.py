"""Which store the ranks agree through, from the options; nothing is started."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from inprocess.agents import _store_spec
from inprocess.environment import Launch
from inprocess.exception import OptionError
from inprocess.job import Job
from inprocess.options import Options
from inprocess.store import FileStore, StoreSpec, TCPStore


def spec(agent_store: bool = False, calls: int = 2, **options: Any) -> StoreSpec:
    launch = Launch(rank=0, world_size=2, host="10.0.0.1", port=29500, agent_store=agent_store, attempt="0")
    return _store_spec(Options.build(**options), Job(launch, (0, 1), calls))


@pytest.mark.parametrize("factory", [None, TCPStore])
def test_tcp_store(factory: Any) -> None:
    assert spec(store_factory=factory) == spec()
    assert (spec().host, spec().port, spec().prefix) == ("10.0.0.1", 29500, "inprocess/0/2/")
    other = spec(store_kwargs={"host_name": "10.0.0.2", "port": "1234"})
    assert (other.host, other.port) == ("10.0.0.2", 1234)
    with pytest.raises(OptionError, match="TCPStore has no argument 'hostname'"):
        spec(store_kwargs={"hostname": "10.0.0.2"})


def test_only_a_server_of_ours_is_told_from_the_one_of_the_call_before() -> None:
    assert spec().stale_key.startswith("inprocess/0/1/")
    assert not spec(calls=1).stale_key
    assert not spec(agent_store=True).stale_key
    assert spec(agent_store=True, store_kwargs={"port": 1234}).stale_key


def test_another_store_class() -> None:
    found = spec(store_factory=FileStore, store_kwargs={"path": "/shared/store"})
    assert (found.factory, found.kwargs) == ("inprocess.store:FileStore", {"path": "/shared/store"})
    assert StoreSpec.from_json(found.to_json()) == found
    with pytest.raises(OptionError, match="must be a class or function at the top level"):
        spec(store_factory=lambda: None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("timeout", datetime.timedelta(seconds=3)), ("path", Path("/shared/store")), ("more", {"key": [{1}]})],
)
def test_arguments_that_json_cannot_carry(key: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        spec(store_factory=FileStore, store_kwargs={"prefix": "a", key: value})
    assert f"store_kwargs: {key}={value!r} cannot travel" in str(caught.value)
    assert "pass a string, a number" in str(caught.value)
