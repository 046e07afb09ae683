"""What is read from the launcher's variables, and which of them are not needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inprocess.call import launch_variables
from inprocess.call.launch_variables import Launch
from inprocess.exception import OptionError
from inprocess.system.environment import CHANGED

RANKS = {"RANK": "3", "WORLD_SIZE": "8"}


def test_rank_and_world_size_alone() -> None:
    launch = launch_variables.read(RANKS)
    assert (launch.rank, launch.world_size, launch.host, launch.port) == (3, 8, "", 0)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_without_one_of_the_two(missing: str) -> None:
    with pytest.raises(OptionError, match=f"variable {missing} is not set. Start the script"):
        launch_variables.read({name: value for name, value in RANKS.items() if name != missing})


def test_without_both() -> None:
    with pytest.raises(
        OptionError, match=r"variables RANK and WORLD_SIZE are not set\. Start .*inprocess run.*enabled=False"
    ):
        launch_variables.read({"RANK": " "})


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the launcher has set, and nothing else of it."""
    for name in (*CHANGED, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def change(env: dict[str, str]) -> None:
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    return change


def test_the_address_of_the_store(variables: Callable[..., None]) -> None:
    env = RANKS | {"MASTER_ADDR": " 10.0.0.1 ", "MASTER_PORT": "29500"}
    variables(env)
    launch = launch_variables.read()
    assert (launch.host, launch.port) == ("10.0.0.1", 29500)
    assert (launch_variables.master_addr(), launch_variables.master_port()) == ("10.0.0.1", 29500)


@pytest.mark.parametrize("port", ["", "0", "65536", "tcp://10.0.0.1:29500"])
def test_a_port_that_is_none_is_an_error_only_where_it_is_needed(port: str, variables: Callable[..., None]) -> None:
    """Kubernetes sets MASTER_PORT to a URL where a service is named "master"."""
    env = RANKS | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": port}
    variables(env)
    assert launch_variables.read().port == 0
    with pytest.raises(OptionError, match=r"MASTER_PORT.*(is not set|is not a number in 1\.\.65535).*store_kwargs=\{"):
        launch_variables.master_port()


def test_no_address_where_it_is_needed(variables: Callable[..., None]) -> None:
    variables(RANKS)
    with pytest.raises(OptionError, match=r"MASTER_ADDR is not set.*store_kwargs=\{'host_name'"):
        launch_variables.master_addr()


@pytest.mark.parametrize(
    ("env", "split"),
    [
        ({}, ""),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, ""),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 with WORLD_SIZE=8"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 with RANK=3"),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": "first"}, ""),
    ],
)
def test_variables_that_tell_of_other_hosts(env: dict[str, str], split: str, variables: Callable[..., None]) -> None:
    variables(env)
    launch = Launch(rank=3, world_size=8, host="", port=0, agent_store=False, attempt="0")
    assert launch_variables.elsewhere(launch) == split
