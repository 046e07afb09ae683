"""What is read from the launcher's variables, and which of them are not needed."""

from __future__ import annotations

import pytest

from inprocess import environment
from inprocess.environment import Launch
from inprocess.exception import OptionError

RANKS = {"RANK": "3", "WORLD_SIZE": "8"}


def test_rank_and_world_size_alone() -> None:
    launch = environment.read(RANKS)
    assert (launch.rank, launch.world_size, launch.host, launch.port) == (3, 8, "", 0)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_without_one_of_the_two(missing: str) -> None:
    with pytest.raises(OptionError, match=f"variable {missing} is not set. Start the script"):
        environment.read({name: value for name, value in RANKS.items() if name != missing})


def test_without_both() -> None:
    with pytest.raises(
        OptionError, match=r"variables RANK and WORLD_SIZE are not set\. Start .*inprocess run.*enabled=False"
    ):
        environment.read({"RANK": " "})


def test_the_address_of_the_store() -> None:
    env = RANKS | {"MASTER_ADDR": " 10.0.0.1 ", "MASTER_PORT": "29500"}
    launch = environment.read(env)
    assert (launch.host, launch.port) == ("10.0.0.1", 29500)
    assert (environment.master_addr(env), environment.master_port(env)) == ("10.0.0.1", 29500)


@pytest.mark.parametrize("port", ["", "0", "65536", "tcp://10.0.0.1:29500"])
def test_a_port_that_is_none_is_an_error_only_where_it_is_needed(port: str) -> None:
    """Kubernetes sets MASTER_PORT to a URL where a service is named "master"."""
    env = RANKS | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": port}
    assert environment.read(env).port == 0
    with pytest.raises(OptionError, match=r"MASTER_PORT.*(is not set|is not a number in 1\.\.65535).*store_kwargs=\{"):
        environment.master_port(env)


def test_no_address_where_it_is_needed() -> None:
    with pytest.raises(OptionError, match=r"MASTER_ADDR is not set.*store_kwargs=\{'host_name'"):
        environment.master_addr(RANKS)


@pytest.mark.parametrize(
    ("variables", "split"),
    [
        ({}, ""),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, ""),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 with WORLD_SIZE=8"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 with RANK=3"),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": "first"}, ""),
    ],
)
def test_variables_that_tell_of_other_hosts(variables: dict[str, str], split: str) -> None:
    launch = Launch(rank=3, world_size=8, host="", port=0, agent_store=False, attempt="0")
    assert environment.elsewhere(launch, variables) == split
