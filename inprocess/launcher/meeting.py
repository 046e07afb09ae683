"""How the launchers of a job's nodes meet: torch's rendezvous, and then a store of their own for the workers.

A *generation* is all workers from one start of the whole group to the next. Each has a fresh store server in the
launcher of the node with group rank 0: what the workers of the generation before left in theirs would be taken for the
answers of the new ones. A node that comes while a generation runs joins it without a rendezvous, where its workers can
be taken in (they are wrapped). Where the store of the rendezvous is lost with its host, the nodes go on, and write what
they know into the one that a new launcher serves at the same endpoint. Keys, all below ``inprocess/`` in that store:

    workers             where this generation's store is, and its number (in the generation's own part of the store)
    rank/<n>            the group rank that the n-th node had before, and the generation after its last (likewise)
    generations         counts them
    launchers           counts those that came
    running             the generation that can be joined: its number, where its store is, how many nodes began it
    table/<g>           who has which ranks in generation g, see ``nodes``
    alive/<owner>       grows while that launcher lives; its neighbour in the table looks at it, by its own clock
    restart/<g>         why all workers of generation g are to be restarted
    ended               why the job has ended
    run_dir             the name of the directory for events, see ``run_dir``
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousTimeoutError,
)

from inprocess.exception import StoreLost, TimeoutError
from inprocess.finalize import run_in_thread
from inprocess.launcher import shared_table
from inprocess.launcher.generation import Generation, NodeEvent, agree_on_rank
from inprocess.launcher.node_watch import NodeWatch, Shortage
from inprocess.launcher.nodes import DONE, LEFT, LOST, RUNNING, Block, Table
from inprocess.launcher.shared_table import Silence
from inprocess.stores import addresses, connecting, serving
from inprocess.stores.tcp import PrefixStore
from inprocess.system import clock, strict_json
from inprocess.system.logs import get_logger

__all__ = ["LEAST_PATIENCE_S", "NodeRendezvous", "why_not_met"]

log = get_logger(__name__)
#: torch's own variable
NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
#: between two signs of life (seconds)
HEARTBEAT_S = 1.0
#: with less patience a sign of life that comes late would make a living node lost (seconds)
LEAST_PATIENCE_S = 3 * HEARTBEAT_S
#: between two looks of a node that waits for a free place (seconds), or for a store that was lost
POLL_INTERVAL_S = 0.25
#: how long the first launcher at a new store waits for nodes that are left of a job (seconds)
REAPPEAR_S = 2.0
#: how long the store of the rendezvous may take to answer where the workers wait for that (seconds)
ANSWER_S = 5.0
#: how long the others may take to look, beside two intervals (seconds)
LINGER_S = 0.3
#: how long such a store may take to answer (seconds)
CONNECT_TIMEOUT_S = 10.0


class NodeRendezvous:
    """One node's part in the rendezvous.

    Args:
        make: makes torch's handler; blocks until the store of the rendezvous answers.
        endpoint: where that store is; None: unknown, what is lost stays lost.
        towards: a host that all nodes know: by the route to it this node finds its own address, where need be.
        nodes: fewest and most that the job has.
        size: how many workers this node has.
        local_addr: the address of this node for the others; None: it is found out.
        master_addr: the address of the node with rank 0, with a static rendezvous.
        preferred_rank: the group rank that this node would like to have; -1: any.
        join: whether it may join a generation that runs.
        interval: how often it is asked what the others want (seconds); at least once between two signs of life.
        patience: a node that is silent for so long is lost, and so long too few may be left (seconds).
        join_timeout: how long to wait for a new store where the last one was lost (seconds).
    """

    def __init__(
        self,
        make: Callable[[], RendezvousHandler],
        *,
        endpoint: tuple[str, int] | None,
        towards: str,
        nodes: tuple[int, int],
        size: int,
        local_addr: str | None,
        master_addr: str | None,
        preferred_rank: int,
        join: bool,
        interval: float,
        patience: float,
        join_timeout: float,
    ) -> None:
        self.handler = make()
        self._make, self._endpoint, self._towards = make, endpoint, towards
        self._size, self._interval, self._patience = size, min(interval, HEARTBEAT_S), patience
        self._join_timeout, self._preferred_rank = join_timeout, preferred_rank
        self._fewest, self._most = nodes
        self._shortage = Shortage(self._fewest, patience)
        self._local_addr, self._master_addr, self._may_join = local_addr, master_addr, join
        self._static = self.handler.get_backend() == "static"
        self._me = shared_table.new_owner()
        self._met: Generation | None = None
        self._root: Any = None
        self._agreed: dict[str, str] = {}
        self._server: Any = None
        self._watch: NodeWatch | None = None
        self._done = self._open = False
        #: the store of the rendezvous has not answered; its last handler has no use any more
        self.lost = self._orphaned = False
        #: what the others wrote down last, for a new store
        self._table, self._running = Table(), ""
        #: when something was said that the others have to hear before the store goes
        self._last_word = 0.0
        #: there are other nodes in the job
        self.others = False
        self._next_beat = 0.0
        #: the sign of life of the neighbour, and when it was new
        self._heard: tuple[str, bytes, float] = ("", b"", 0.0)

    @property
    def alone(self) -> bool:
        """The job can have no other node."""
        return self._most == 1

    def next(self) -> Generation:
        """Meet the other nodes; blocks until they are there. The workers of the last generation have ended."""
        self.rest()
        self._server = None  # its port and its keys go with it
        self._tell(lambda: self._root.check(["ended"]))  # whether it still answers
        self._done = self._open = self.lost = False
        self._running = ""
        if self._orphaned:
            self.handler, self._orphaned = self._make_again(), False
        self._met = self._alone() if self.alone else self._join_early() or self._together()
        self.others = self._met.nodes > 1
        return self._met

    def _make_again(self) -> RendezvousHandler:
        """Wait for a launcher that serves a store where the last one was, as long as for any rendezvous."""
        deadline = clock.monotonic() + self._join_timeout
        log.info("this node waits for the store of the rendezvous")
        while True:
            try:
                return self._make()
            except RendezvousConnectionError:
                if clock.monotonic() > deadline:
                    raise
            threading.Event().wait(1.0)

    def _alone(self) -> Generation:
        info = self._torchs()
        host = self._local_addr or "127.0.0.1"
        self._server = serving.serve(host, 0)
        return Generation(info.store, info.rank, info.world_size, self._last() + 1, host, self._server.port)

    def _torchs(self) -> Any:
        """torch's rendezvous, without the store that it would share with the workers.

        From the second round on only a node that was there before knows that store's address: a new one would wait for
        it in vain.
        """
        before = os.environ.get(NOT_SHARED)
        os.environ[NOT_SHARED] = "1"
        try:
            return self.handler.next_rendezvous()
        finally:
            if before is None:
                del os.environ[NOT_SHARED]
            else:
                os.environ[NOT_SHARED] = before

    def _last(self) -> int:
        return -1 if self._met is None else self._met.generation

    def _join_early(self) -> Generation | None:
        """Join a job that runs without a word to torch's rendezvous, which would have everybody start anew."""
        raw = getattr(self.handler, "_store", None)
        if self._static or raw is None:
            return None
        self._root = PrefixStore("inprocess", PrefixStore(self.handler.get_run_id(), raw))
        if self._may_join and self._root.add("launchers", 1) == 1:
            self._await_survivors()
        return self._join()

    def _await_survivors(self) -> None:
        """The store is new. Where its last host was lost, the nodes that are left write down here what they have."""
        deadline = clock.monotonic() + REAPPEAR_S
        while not self._root.check(["running"]) and clock.monotonic() < deadline:
            threading.Event().wait(POLL_INTERVAL_S)

    def _together(self) -> Generation:
        log.info("this node waits for the others (%s rendezvous)", self.handler.get_backend())
        info = self._torchs()
        # without a store of its own (an older etcd handler) the generation's has to do: then nodes hear less of others
        raw = getattr(self.handler, "_store", None)
        shared = info.store if raw is None else PrefixStore(self.handler.get_run_id(), raw)
        self._root = PrefixStore("inprocess", shared)
        if self._static and (met := self._join(info.rank)):
            return met
        number = self._static_generation() if self._static else 0
        place = PrefixStore(f"inprocess/{number}" if self._static else "inprocess", info.store)
        rank = info.rank
        if not self._static:
            rank, number = agree_on_rank(place, info.rank, info.world_size, self._preferred_rank, self._last() + 1)
        if rank == 0:
            if not self._static:
                number = max(number, self._root.add("generations", 1) - 1)
            host = self._own_address()
            self._server = serving.serve(host, 0)
            place.set("workers", json.dumps([number, host, self._server.port]))
        number, host, port = strict_json.parse(place.get("workers"))
        self._preferred_rank = rank
        return Generation(place, rank, info.world_size, int(number), str(host), int(port))

    def _static_generation(self) -> int:
        """The first that nobody wanted restarted. The store of a static rendezvous is the same in all of them."""
        number = self._last() + 1
        while self._root.check([f"restart/{number}"]):
            number += 1
        return int(number)

    def agree(self, key: str, proposal: str) -> str:
        """What the first node of this job proposed, also where its store was lost since; before `settle`."""
        if self._root is not None and not self.alone:
            with contextlib.suppress(RuntimeError):  # whoever looks after the store says so
                proposal = self._root.compare_set(key, "", proposal).decode(errors="replace")
        self._agreed[key] = proposal
        return proposal

    def _own_address(self) -> str:
        if self._local_addr or self._master_addr:
            return str(self._local_addr or self._master_addr)
        name = str(getattr(getattr(self.handler, "_this_node", None), "addr", "") or socket.getfqdn())
        return addresses.name_or_address(name, self._towards)

    # --- joining a generation that runs -------------------------------------------------------------------------------

    def _join(self, rank: int | None = None) -> Generation | None:
        """Take a block of a running generation; None: there is none to join. Waits while there is no place.

        ``rank``: the only block that a node of a static rendezvous may have.
        """
        told, silent = False, Silence(self._patience)
        pause = threading.Event()
        while (job := self._joinable()) is not None:
            generation, host, port, nodes = job
            text = shared_table.read(self._root, f"table/{generation}")
            table = Table.parse(text)
            if len(table.blocks) >= nodes:  # else those who began it are still writing themselves down
                table = shared_table.without_the_dead(self._root, table, silent)
                if not table.running():
                    return None  # all are gone, and what they wrote is left
                block = self._place(table, rank, silent)
                if block and shared_table.write(self._root, generation, text, table.put(block)):
                    self._running = json.dumps(job)
                    grows, table = block.base == table.world, table.put(block)
                    store = PrefixStore(f"inprocess/joined/{self._me}", self._root)
                    index, present = table.index(block), len(table.present())
                    return Generation(store, index, present, generation, host, port, block, table.world, grows)
            if not told:
                log.info("job already running; this node waits for a free slot")
                told = True
            pause.wait(POLL_INTERVAL_S)
        return None

    def _joinable(self) -> tuple[int, str, int, int] | None:
        """Number, store and first nodes of the generation that can be joined."""
        if not self._may_join or not self._root.check(["running"]):
            return None
        generation, host, port, nodes = strict_json.parse(self._root.get("running"))
        if self._root.check([f"restart/{generation}"]) or self._root.check(["ended"]):
            return None
        return int(generation), str(host), int(port), int(nodes)

    def _place(self, table: Table, rank: int | None, silent: Silence) -> Block | None:
        block = table.place(self._me, self._size, self._most)
        if block is None or rank is None:
            # the world grows only when everybody has had time to be missed
            return block if block is None or block.base < table.world or silent.all_heard else None
        own = table.blocks[rank] if rank < len(table.blocks) else None
        return Block(own.base, own.size, self._me) if own and own.free and own.size == self._size else None

    def _change(self, change: Callable[[Table], Table]) -> None:
        """Change the table of this generation, whoever else does meanwhile."""
        assert self._met is not None
        shared_table.change(self._root, self._met.generation, change)

    def settle(self, base: int) -> None:
        """This node's ranks begin at ``base``; from now on the others hear of it, and it of them."""
        if self.alone or self._met is None:
            return
        if self._met.block is None:
            self._change(lambda table: table.put(Block(base, self._size, self._me)))
        self._shortage = Shortage(self._fewest, self._patience)
        self._watch = NodeWatch(self._look, self._lose, self._interval)

    @property
    def to_open(self) -> bool:
        """Whether this node has not said yet that the generation can be joined. Each does: any of them may be lost."""
        return self._may_join and not self.alone and not self._open

    def open(self) -> None:
        """The workers can take in others: from now on this generation can be joined."""
        assert self._met is not None
        self._open, met = True, self._met
        if self._running:  # it has joined itself
            return
        self._running = json.dumps([met.generation, met.host, met.port, met.nodes])
        self._tell(lambda: self._root.set("running", self._running))
        log.info("other nodes can join from now on")

    def store_answers(self) -> bool:
        """Whether the workers' store is still there; a replacement would wait in vain for one that is not."""
        if self._server is not None or self._met is None:
            return True
        try:
            socket.create_connection((self._met.host, self._met.port), 1.0).close()
        except OSError:
            return False
        return True

    # --- what the nodes tell each other while the workers run ---------------------------------------------------------

    def news(self) -> NodeEvent | None:
        """What another node wants; None also where nobody can be asked."""
        return self._watch.news if self._watch else None

    def _look(self) -> NodeEvent | None:
        """In the watch's thread."""
        assert self._met is not None
        if self.lost and not self._find():
            return None
        restart = f"restart/{self._met.generation}"
        if self._root.check(["ended"]):
            return NodeEvent("end", self._root.get("ended").decode())
        if self._root.check([restart]):
            return NodeEvent("restart", self._root.get(restart).decode())
        if not self._orphaned and (waiting := self.handler.num_nodes_waiting()) > 0:
            return NodeEvent("join", f"{waiting} more {'nodes wait' if waiting > 1 else 'node waits'} to join")
        self._table = Table.parse(self._root.get(f"table/{self._met.generation}"))
        return self._look_at(self._table)

    def _lose(self, error: Exception) -> None:
        """The store of the rendezvous does not answer. The workers of this node do without it."""
        if self.lost:
            return
        what = str(error).partition("\n")[0]
        log.warning("the store of the rendezvous does not answer; the workers of this node go on (%s)", what)
        self.lost = self._orphaned = True
        # over a connection that is lost; it waits for one that is under way
        stop = getattr(self.handler, "_stop_heartbeats", lambda: None)
        threading.Thread(target=stop, name="inprocess-rendezvous", daemon=True).start()

    def _find(self) -> bool:
        """Look for a new store where the last one was, and write down there what is known."""
        if self._endpoint is None or self._met is None:
            return False
        try:
            with socket.create_connection(self._endpoint, 1.0) as probe:
                address = addresses.numeric(probe.getpeername())
            store = connecting.connect_to(address, self._endpoint[1], CONNECT_TIMEOUT_S)
        except (OSError, StoreLost):
            return False
        self._root = PrefixStore("inprocess", PrefixStore(self.handler.get_run_id(), store))
        known = {**self._agreed, f"table/{self._met.generation}": self._table.text(), "running": self._running}
        for key in filter(known.get, known):
            self._root.compare_set(key, "", known[key])
        log.info("the store of the rendezvous answers again; the other nodes can join")
        self.lost = False
        return True

    def _look_at(self, table: Table) -> NodeEvent | None:
        assert self._met is not None
        mine = table.of(self._me)
        if mine is None:
            return NodeEvent("end", "this node was silent for so long that another one has its place")
        if mine.state == LOST:
            self._change(lambda now: now.mark(self._me, DONE if self._done else RUNNING))
        self._beat()
        self._listen(table)
        self.others = len(table.present()) > 1
        if len(table.blocks) < self._met.nodes:  # some are still writing themselves down
            return None
        if self._done and not table.running():
            self._last_word = clock.monotonic()
            return NodeEvent("done", "")
        few = "" if self._done else self._shortage.lasts(table)
        return NodeEvent("few", few) if few else None

    def _beat(self) -> None:
        now = clock.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self._root.set(f"alive/{self._me}", f"{now:.3f}")

    def _listen(self, table: Table) -> None:
        """Look whether the neighbour lives."""
        other = table.watched_by(self._me)
        if other is None:
            return
        beat, now = shared_table.read(self._root, f"alive/{other.owner}"), clock.monotonic()
        if self._heard[:2] != (other.owner, beat):
            self._heard = (other.owner, beat, now)
        elif now - self._heard[2] > self._patience:
            ranks = f"ranks {other.base}-{other.base + other.size - 1}"
            log.warning("the node with %s has been silent for %g s and counts as lost", ranks, self._patience)
            self._change(lambda table: table.mark(other.owner, LOST))

    def want_restart(self, why: str) -> None:
        """Have all nodes restart their workers."""
        self._tell(lambda: self._root.set(f"restart/{self._last()}", why))

    def say_over(self, why: str) -> None:
        """Have all nodes end the job."""
        self._tell(lambda: self._root.set("ended", why))
        self._last_word = clock.monotonic()

    def say_done(self) -> None:
        """The workers of this node are done."""
        self._done = True
        self._tell(lambda: self._change(lambda table: table.mark(self._me, DONE)))

    def say_left(self) -> None:
        """This node leaves; the others may go on."""
        if self._met is not None:
            self._tell(lambda: self._change(lambda table: table.mark(self._me, LEFT)))

    def _tell(self, write: Callable[[], object]) -> None:
        if self._root is None or self.alone or self.lost:
            return
        self._await(write)

    def rest(self) -> None:
        """Ask nobody any more, until the next meeting."""
        if self._watch:
            self._watch.stop()
            self._watch = None

    def close(self, shutdown: bool) -> None:
        """``shutdown``: the rendezvous takes nobody in any more."""
        self.rest()
        shutdown = shutdown and not self._orphaned
        if shutdown and self._done:  # before the store goes with the launcher that serves it; nobody meets again
            self._await(self.handler.shutdown)
        if self._last_word and not (self.lost or self.alone):  # the store may go, and the others shall hear it first
            threading.Event().wait(self._last_word + 2 * self._interval + LINGER_S - clock.monotonic())
        self._server = None
        if shutdown and not self._done:
            self._await(self.handler.shutdown)

    def _await(self, action: Callable[[], object]) -> None:
        """Do it in a thread of its own: a host that was stopped, or is cut off, neither answers nor refuses, and then
        torch's client waits without a limit. Without an answer in time the store is lost, and the action goes on."""
        try:
            run_in_thread("rendezvous", ANSWER_S, action, f"no answer within {ANSWER_S:g} s")
        except (RuntimeError, TimeoutError) as error:
            self._lose(error)


def why_not_met(error: Exception) -> str:
    """What torch's rendezvous, or its store, says in many lines or in none."""
    if isinstance(error, RendezvousTimeoutError):
        return "too few nodes came in time (--rdzv-conf join_timeout=SECONDS)"
    if isinstance(error, RendezvousClosedError):
        return "the job has ended, its rendezvous is closed; a new one needs another --rdzv-id"
    return str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
