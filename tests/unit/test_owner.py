"""Whose a base store is, who may use it, and what two jobs that meet before one has begun leave behind."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from inprocess.call import launch_variables
from inprocess.exception import BadMessage, OptionError, RestartAbort, StoreLost
from inprocess.monitor.connections import Connections
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import JoinMode
from inprocess.protocol.parsing import load_decision
from inprocess.stores import serving
from inprocess.stores.owner import Access, Owner, access, find_owner, kinship
from tests.sim.engine import SimStore

from .verbs import do

FOUND, EITHER, REPLACE, GROW = JoinMode.FOUND, JoinMode.EITHER, JoinMode.REPLACE, JoinMode.GROW
SERVED = Owner(drawn="a", world_size=2, by="pid 1")
NEW = Owner(world_size=2)


@pytest.mark.parametrize(
    ("found", "mine", "entry", "expected"),
    [
        ({}, {}, FOUND, "granted"),
        ({"call": 2}, {}, FOUND, "denied"),
        ({"world_size": 4}, {}, FOUND, "denied"),
        ({"world_size": 4, "call": 2}, {}, REPLACE, "granted"),
        ({"world_size": 4, "call": 2}, {}, GROW, "granted"),
        ({"name": "x"}, {}, REPLACE, "denied"),
        ({"name": "x"}, {"name": "y"}, EITHER, "denied"),
        ({"name": "x", "call": 3}, {"name": "x"}, EITHER, "granted"),
        # over
        ({"over": True}, {}, FOUND, "later"),
        ({"over": True, "name": "x"}, {"name": "x"}, EITHER, "later"),
        ({"over": True}, {}, REPLACE, "granted"),
        ({"over": True, "name": "x"}, {"name": "y"}, REPLACE, "later"),
        # a later call
        ({"call": 2}, {"call": 2, "drawn": "a"}, EITHER, "granted"),
        ({"call": 2}, {"call": 2, "drawn": "b"}, EITHER, "denied"),
        ({"over": True}, {"call": 2, "drawn": "b"}, EITHER, "later"),
    ],
)
def test_who_may_use_a_store(found: dict[str, Any], mine: dict[str, Any], entry: JoinMode, expected: str) -> None:
    server, process = dataclasses.replace(SERVED, **found), dataclasses.replace(NEW, **mine)
    assert access(server, process, entry) is Access(expected)


@pytest.mark.parametrize("text", ["", "[]", "1", "{", '{"call": "1"}', '{"over": 1}', '{"call": true}', '{"more": 1}'])
def test_what_another_program_wrote(text: str) -> None:
    with pytest.raises(BadMessage, match="inprocess/owner"):
        Owner.from_json(text)
    assert Owner.from_json(SERVED.to_json()) == SERVED


def test_kin_have_parent_folder_and_command_in_common() -> None:
    program = "from inprocess.stores.owner import kinship; print(*kinship(), sep='|')"

    def ask(*arguments: str, **options: Any) -> list[str]:
        environ = os.environ | {"PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True, **options).stdout.split(
            "|"
        )

    first = ask("a")
    assert first == ask("a") and first[0] == kinship()[0]
    for other in (ask("b"), ask("a", cwd="/")):
        assert other[0] == first[0] and other[1] != first[1]
        assert not Owner(host=first[0], kin=first[1]).is_kin(Owner(host=other[0], kin=other[1]))
    assert Owner(host="here", kin="a").is_kin(Owner(host="there", kin="b"))


@pytest.mark.parametrize(
    ("variables", "entry", "name"),
    [
        ({}, FOUND, ""),
        ({"INPROCESS_RESTART": "1"}, REPLACE, ""),
        ({"INPROCESS_GROW": "1", "INPROCESS_RESTART": "0"}, GROW, ""),
        ({"INPROCESS_JOB": " mine "}, EITHER, "mine"),
        ({"INPROCESS_JOB": "mine", "INPROCESS_RESTART": "2"}, REPLACE, "mine"),
        ({"INPROCESS_JOB": "mine", "TORCHELASTIC_RUN_ID": "id"}, EITHER, "mine"),
        ({"TORCHELASTIC_RUN_ID": "id"}, FOUND, "id"),
        ({"TORCHELASTIC_RUN_ID": "none"}, FOUND, ""),
    ],
)
def test_what_the_launcher_says(variables: dict[str, str], entry: JoinMode, name: str) -> None:
    launch = launch_variables.read({"RANK": "0", "WORLD_SIZE": "1", **variables})
    assert (launch.entry, launch.name) == (entry, name)


@pytest.mark.parametrize("name", ["x" * 201, "a\nb"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(OptionError, match=r"INPROCESS_JOB=.* is no name of a job"):
        launch_variables.read({"RANK": "0", "WORLD_SIZE": "1", "INPROCESS_JOB": name})


@pytest.mark.parametrize("entry", [FOUND, EITHER, REPLACE])
def test_who_comes_after_that_is_told_why_nobody_begins(entry: JoinMode) -> None:
    store = SimStore()
    do(store, verbs.refuse_founding("both have RANK=0"))
    with pytest.raises(RestartAbort, match="two jobs have met, so none begins: both have RANK=0"):
        do(store, verbs.join(Membership.founder(1, (0, 1), 2), "1A", entry))


@pytest.mark.parametrize("in_doubt", [True, False])
def test_two_jobs_found_one_at_the_same_time(in_doubt: bool) -> None:
    """In any order of operations: one process for a rank, and nobody begins where the stranger was noticed before."""
    seen = set()
    for seed in range(2000):
        store, chance = SimStore(), random.Random(seed)
        two = Membership.founder
        processes: dict[str, Any] = {
            "0A": verbs.join(two(0, (0, 1), 2), "0A", in_doubt=in_doubt),
            "1A": verbs.join(two(1, (0, 1), 2), "1A", in_doubt=in_doubt),
            "1B": verbs.join(two(1, (0, 1), 2), "1B", in_doubt=in_doubt),
        }
        if in_doubt and seed % 2:  # its rank 0 finds the port taken
            processes["0B"] = verbs.refuse_founding("port")
        ends, answers, clash_at_begin = dict[str, str](), dict[str, Any](), None
        while processes:
            name = chance.choice(list(processes))
            try:
                answers[name] = store.execute(processes[name].send(answers.get(name)))
            except StopIteration as end:
                ends[name] = str(end.value)
            except (OptionError, RestartAbort) as error:
                ends[name] = type(error).__name__
            if name in ends:
                del processes[name]
            if clash_at_begin is None and "-1/next" in store.data:
                clash_at_begin = "OptionError" in ends.values()
        aborted = bool(load_decision(store.data["-1/next"], "next").abort)
        founders = [name for name in ("1A", "1B") if ends[name] == "True"]
        assert len(founders) <= 1 and "ticket#" not in store.data
        assert aborted or (len(founders) == 1 and ends["0A"] == "True")
        assert not (clash_at_begin and in_doubt) or aborted
        assert in_doubt or not aborted
        seen.add((aborted, *founders))
    assert {(False, "1A"), (False, "1B")} <= seen
    assert in_doubt == any(aborted for aborted, *_ in seen)


class Going:
    """A store whose server ends now: what is asked of it fails as torch has it."""

    def compare_set(self, *args: object) -> None:
        raise RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed.\nC++ frames")


def test_a_server_that_goes_while_it_is_asked_whose_it_is() -> None:
    """That of the job before: who joins begins again then, and must not take it for an error of this library."""
    with pytest.raises(StoreLost, match="asked whose it is: Failed to recv"):
        find_owner(Going())


@pytest.mark.parametrize("free", [True, False])
def test_a_port_that_becomes_free_while_its_server_is_asked(monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
    """The server of the job before: it was there when this one tried to listen, and gone when it was to answer."""
    tries: list[int] = []

    def serve(host: str, port: int, bind: str) -> str:
        tries.append(port)
        if len(tries) == 1 or not free:
            raise serving.PortTaken("Address already in use")
        return "server"

    monkeypatch.setattr(serving, "serve", serve)
    config = SimpleNamespace(barrier_timeout=20.0, owner="mine", serve_host="127.0.0.1", bind="")
    monitor: Any = SimpleNamespace(_config=config, _is_over=lambda port: False)
    if free:
        assert Connections._listen(monitor, 1234) == "server"
    else:
        with pytest.raises(serving.PortTaken):
            Connections._listen(monitor, 1234)
    assert tries == [1234, 1234]
