"""Nodes that come and go while a job runs: the workers of the others are the same processes all the time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inprocess.launcher import shared_table
from inprocess.launcher.nodes import DONE, LEFT, LOST, Block, Table
from tests.launcher.harness import CEILING, WORKER, Hub, Launcher, Worker, free_port

Run = Callable[..., Launcher]
Node = Callable[..., Launcher]


@pytest.fixture
def node(start: Run, hub: Hub) -> Iterator[Node]:
    """`node("1:2")`: a launcher of one job with two workers. All share a port."""
    with free_port() as port:

        def begin(nodes: str, *options: str, size: int = 2, last_call: int = 1) -> Launcher:
            where = ["--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            # with fewer attempts torch's own rendezvous takes living nodes for dead: it looks once in a second
            patient = ["--rdzv-conf", f"last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=4"]
            size_and_count = ["--nnodes", nodes, "--nproc-per-node", str(size), "--local-addr", "127.0.0.1"]
            return start(*where, *patient, *size_and_count, *options, WORKER, hub.path, "wrapped")

        yield begin


def pair(node: Node, hub: Hub, *options: str, nodes: str = "1:2") -> tuple[list[Launcher], list[Worker]]:
    """Two nodes; the first has the store of the rendezvous. Its workers are not always the first."""
    first = node(nodes, *options, last_call=30)  # the second one may take its time
    first.expect("this node waits for the others")
    second = node(nodes, *options, last_call=30)
    workers = hub.group(4)
    for launcher in (first, second):
        launcher.expect("other nodes can join from now on")
    mine = [worker for worker in workers if parent(worker) == first.pid]
    return [first, second], mine + [worker for worker in workers if worker not in mine]


def parent(worker: Worker) -> int:
    with open(f"/proc/{worker.pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def kill(launcher: Launcher, workers: list[Worker]) -> None:
    """A host disappears."""
    for pid in (launcher.pid, *(worker.pid for worker in workers)):
        os.kill(pid, signal.SIGKILL)
    assert launcher.finish() == -signal.SIGKILL
    for worker in workers:
        worker.gone()


def ranks(workers: list[Worker]) -> list[tuple[int, str, int]]:
    return [(worker.rank, worker.env["WORLD_SIZE"], worker.restart) for worker in workers]


def end(launchers: list[Launcher], workers: list[Worker]) -> None:
    for worker in workers:
        assert worker.ask("show still here") == {"shown": True}
        worker.tell("exit 0")
    for launcher in launchers:
        assert launcher.finish() == 0, launcher.err


def test_a_new_node_gets_ranks_beyond(node: Node, hub: Hub) -> None:
    first = node("1:2")
    old = hub.group(2)
    first.expect("other nodes can join from now on")
    second = node("1:2")
    new = hub.group(2)
    assert [worker.env["INPROCESS_GROW"] for worker in old + new] == ["", "", "1", "1"]
    assert (ranks(old), ranks(new)) == ([(0, "2", 0), (1, "2", 0)], [(2, "4", 1), (3, "4", 1)])
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        assert old[0].env[name] == new[0].env[name]
    end([first, second], old + new)
    assert "joins a running job with ranks 2-3 of 4" in second.err


def test_a_node_that_returns_has_the_free_ranks(node: Node, hub: Hub) -> None:
    (first, second), workers = pair(node, hub)
    second.signal(signal.SIGTERM)
    assert second.finish() == 128 + signal.SIGTERM
    third = node("1:2")
    again = hub.group(2)
    assert ranks(again) == [(worker.rank, "4", 1) for worker in workers[2:]]
    assert [worker.env["INPROCESS_GROW"] for worker in again] == ["", ""]
    end([first, third], workers[:2] + again)


def test_a_lost_node_is_replaced(node: Node, hub: Hub) -> None:
    (first, second), workers = pair(node, hub)
    kill(second, workers[2:])
    third = node("1:2")
    again = hub.group(2)
    assert ranks(again) == [(worker.rank, "4", 1) for worker in workers[2:]]
    end([first, third], workers[:2] + again)


def test_a_node_is_lost_while_the_other_one_is_done(node: Node, hub: Hub) -> None:
    """The one that is done does not wait for it until its exit barrier is over."""
    (first, second), workers = pair(node, hub)
    for worker in workers[:2]:
        worker.tell("exit 0")
        worker.gone()
    kill(second, workers[2:])
    assert first.finish() == 0, first.err
    assert "has been silent for 4 s and counts as lost" in first.err


def test_the_node_with_the_store_of_the_rendezvous_is_lost(node: Node, hub: Hub) -> None:
    (first, second), workers = pair(node, hub)
    kill(first, workers[:2])
    second.expect("the store of the rendezvous does not answer; the workers of this node go on")
    third = node("1:2")
    again = hub.group(2)
    assert ranks(again) == [(worker.rank, "4", 1) for worker in workers[:2]]
    end([second, third], workers[2:] + again)


def test_the_store_of_the_workers_is_lost(node: Node, hub: Hub) -> None:
    """Nobody can join any more. When the last workers fail of it, all start anew, with the launcher that returns."""
    first = node("2:2", "--max-restarts", "1")
    first.expect("this node waits for the others")
    second = node("2:2", "--max-restarts", "1")
    workers = hub.group(4)
    lost, left = (first, second) if parent(workers[0]) == first.pid else (second, first)
    kill(lost, workers[:2])
    workers[2].tell("exit 1")
    left.expect("failed: exit code 1; all workers are restarted, 1 of 1")
    workers[3].gone()
    third = node("2:2", "--max-restarts", "1")
    again = hub.group(4)
    assert [worker.restart for worker in again] == [0] * 4
    assert [worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in again] == ["1"] * 4  # though the store is new
    end([left, third], again)


def test_a_node_of_a_static_rendezvous_returns(start: Run, hub: Hub) -> None:
    with free_port() as port:
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        options += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=10"]
        first, second = (start(*options, "--node-rank", rank, WORKER, hub.path, "wrapped") for rank in "01")
        workers = hub.group(4)
        first.expect("other nodes can join from now on")
        kill(second, workers[2:])
        third = start(*options, "--node-rank", "1", WORKER, hub.path, "wrapped")
        again = hub.group(2)
        assert ranks(again) == [(2, "4", 1), (3, "4", 1)]
        end([first, third], workers[:2] + again)


def test_too_few_nodes_are_left(node: Node, hub: Hub) -> None:
    """All workers are restarted once there are enough again."""
    first = node("2:2", "--max-restarts", "1")
    first.expect("this node waits for the others")
    second = node("2:2", "--max-restarts", "1")
    workers = hub.group(4)
    mine = [worker for worker in workers if parent(worker) == first.pid]
    others = [worker for worker in workers if worker not in mine]
    kill(second, others)
    first.expect("1 of 2 nodes are left, and the job needs 2; if no node comes within 4 s, all workers are restarted")
    first.expect("1 of 2 nodes are left, and the job needs 2; all workers are restarted, 1 of 1")
    for worker in mine:
        worker.gone()
    third = node("2:2", "--max-restarts", "1")
    again = hub.group(4)
    assert [worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in again] == ["1"] * 4
    assert [worker.restart for worker in again] == [0] * 4
    end([first, third], again)


@pytest.mark.parametrize("nodes", ["1:2", "2:2"])
def test_a_spare_node_waits_for_a_place(node: Node, hub: Hub, nodes: str) -> None:
    """It takes it, also where the others are too few without it: their workers go on."""
    (first, second), workers = pair(node, hub, nodes=nodes)
    spare = node(nodes)
    spare.expect("job already running; this node waits for a free slot")
    second.signal(signal.SIGINT)
    again = hub.group(2)
    assert ranks(again) == [(worker.rank, "4", 1) for worker in workers[2:]]
    assert second.finish() == 128 + signal.SIGINT
    end([first, spare], workers[:2] + again)


# --- the table ----------------------------------------------------------------------------------------------------


def table(*states: str) -> Table:
    return Table(tuple(Block(2 * i, 2, f"host:{i}:x", state) for i, state in enumerate(states)))


@pytest.mark.parametrize(
    ("before", "size", "most", "base"),
    [
        (table("running", "running"), 2, 3, 4),  # beyond the others
        (table("running", LEFT, LOST), 2, 3, 2),  # the first that is free
        (table("running", LEFT), 1, 3, 4),  # not of its size
        (table("running", DONE), 2, 2, None),  # a node that is done is still there
        (table("running", "running"), 2, 2, None),
    ],
)
def test_place(before: Table, size: int, most: int, base: int | None) -> None:
    block = before.place("new:1:x", size, most)
    assert (block and block.base) == base


def test_table() -> None:
    one = table("running", LEFT, "running")
    assert Table.parse(one.text()) == one
    assert Table.parse(b"") == Table()
    assert (one.world, len(one.present()), len(one.running())) == (6, 2, 2)
    assert one.watched_by("host:0:x") == one.blocks[2]
    assert one.watched_by("host:2:x") == one.blocks[0]
    assert one.watched_by("host:1:x") is None
    assert one.mark("host:2:x", LOST).watched_by("host:0:x") is None
    # one that is done, and waits for the others, looks for them too
    assert one.mark("host:0:x", DONE).watched_by("host:0:x") == one.blocks[2]
    assert one.mark("host:2:x", DONE).watched_by("host:0:x") is None
    assert one.put(Block(2, 2, "new:1:x")).of("host:1:x") is None


def test_who_is_dead_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process id, where that is of the same namespace: the host name, which containers may share, is nothing."""
    space, here, token = shared_table.new_owner().rsplit(":", 2)
    gone = subprocess.Popen(["true"])
    gone.wait()
    owners = [
        (f"{space}:{here}:{token}", False),
        (f"{space}:{gone.pid}:{token}", True),
        (f"another boot pid:[1]:{gone.pid}:{token}", False),
        (f"{socket.gethostname()}:{gone.pid}:{token}", False),
    ]
    assert [shared_table._is_dead_here(owner) for owner, _ in owners] == [dead for _, dead in owners]

    def unknown() -> str:
        raise PermissionError

    monkeypatch.setattr(shared_table.procfs, "pid_space", unknown)
    assert not shared_table._is_dead_here(shared_table.new_owner().replace(f":{here}:", f":{gone.pid}:"))


def test_the_last_launcher_closes_the_rendezvous_in_time(node: Node, hub: Hub) -> None:
    """It notices later that all are done, when the one that serves the store of the rendezvous is about to leave."""
    first = node("2:2", "--monitor-interval", "0.1", last_call=30)
    first.expect("this node waits for the others")
    launchers = [first, node("2:2", "--monitor-interval", "0.3", last_call=30)]
    end(launchers, hub.group(4))
    for launcher in launchers:
        assert "failed to shutdown" not in launcher.err and "frame #" not in launcher.err, launcher.err


def test_all_workers_die_at_once_on_two_nodes(start: Run, tmp_path: Path) -> None:
    """Each is started again alone and finds nobody to join, which is the way to recovery: one line says so. The
    launchers then restart all workers."""
    script = os.path.join(os.path.dirname(__file__), "killed_script.py")
    with free_port() as port:
        where = ["--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        size = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1", "--max-restarts", "2"]
        launchers = [start(*where, *size, script, str(tmp_path)) for _ in range(2)]
        for launcher in launchers:
            launcher._deadline += CEILING  # three times a worker imports torch, and its monitor
        assert [launcher.finish() for launcher in launchers] == [0, 0]
    for launcher in launchers:
        assert launcher.out.count("<finished>") == 1
        assert "nobody left to join" in launcher.err and "restarts all workers" in launcher.err
        assert "Traceback" not in launcher.err and "frame #" not in launcher.err, launcher.err
