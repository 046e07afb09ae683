"""Evidence of ranks whose events are on another host, through the store.

Where hosts have run directories of their own, the first ones' reports would know nothing of the others' ranks. So after
an incident each monitor looks whether the events of those who write reports lie beside its own. Where they do not, it
puts what is most important, 4 kB at most, into the store; and those who write reports fetch what they do not have, and
lay it beside their own events.

All of it runs in threads of its own that nobody waits for, except for a moment at the end of the process: a disk or a
store that does not answer costs a line in the report. They begin when the restart is over: to start two threads in
each monitor while the ranks go on made it 1 ms longer (4 ranks on 2 cores).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from inprocess.events import stream
from inprocess.events.digest import cut, lines_of
from inprocess.events.files import FOLDER, MAX_FILE_BYTES, RELAYED, file_name
from inprocess.events.record import MAX_LINE_BYTES, Event, Header, parse
from inprocess.monitor.configuration import MonitorConfig
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.stores.driver import execute
from inprocess.system.logs import get_logger
from inprocess.system.private_folder import Folder, NotPrivate, own

__all__ = ["FETCH_S", "SEND_S", "Relay"]

log = get_logger("inprocess.monitor")
#: after the decision: the others' events are written by then; and when they are fetched (seconds)
SEND_S, FETCH_S = 0.3, 0.6
#: how long the end of the process waits for what is being sent (seconds)
LEAVE_S = 1.0
#: the first members whose reports are to be whole, and those of which evidence travels, beside those that failed
READERS, SENDERS = 3, 256
#: of the rank's own file, from its end (bytes)
TAIL_BYTES = 1 << 18
Action = Callable[[Any], object]


class Relay:
    """Of one call, in a monitor.

    Args:
        config: of the monitor.
        with_store: does something over a connection of its own; blocks.
    """

    def __init__(self, config: MonitorConfig, with_store: Callable[[Action], object]) -> None:
        self._run_dir, self._job, self._call = config.run_dir or "", config.job, config.call
        self._rank, self._pid, self._with_store = config.rank, config.training_pid, with_store
        # what `send` and `fetch` are to do
        self._to_send: Callable[[], None] | None = None
        self._to_fetch: Callable[[], None] | None = None
        self._sends: threading.Thread | None = None
        self._fetches: threading.Thread | None = None
        # members that had gone when something was fetched; the next time their digests go, too
        self._gone: set[int] = set()

    def happened(self, iteration: int, before: Membership, now: Membership | None, failed: Collection[int]) -> None:
        """See `inprocess.monitor.roles.Witness.decided`. `send` is to be called `SEND_S` after this, and `fetch` after
        `FETCH_S`."""
        member, is_decided = before.member, now is not None
        now = now or before
        if not self._run_dir or member not in before.roster:
            return
        if before.slot_of(member) in failed or member in before.roster[:SENDERS]:
            readers = {before.slot_of(each) for each in (*now.roster[:READERS], *before.roster[:READERS])}
            self._to_send = lambda: self._send(member, iteration, readers - {self._rank})
        if is_decided and member in now.roster[:READERS]:
            removed = set(before.roster) - set(now.roster)
            named = [each for each in before.roster if each in removed or before.slot_of(each) in failed]
            wanted = dict.fromkeys((*before.roster[:SENDERS], *named))
            slots = {each: before.slot_of(each) for each in wanted if each != member}
            self._to_fetch = lambda: self._fetch(slots, removed)

    def send(self) -> None:
        """Begin to send what is to be sent of the latest incident."""
        if (action := self._to_send) is not None:
            self._to_send, self._sends = None, self._begin(self._sends, action)

    def fetch(self) -> None:
        """Begin to fetch what others have sent."""
        if (action := self._to_fetch) is not None:
            self._to_fetch, self._fetches = None, self._begin(self._fetches, action)

    def leave(self) -> None:
        """The process ends: what it knows, perhaps how its rank died, is sent at once."""
        self.send()
        if self._sends is not None:
            self._sends.join(LEAVE_S)

    def _begin(self, before: threading.Thread | None, action: Callable[[], None]) -> threading.Thread:
        if before is not None and before.is_alive():  # it waits for a disk or the store
            return before
        thread = threading.Thread(target=_quietly, args=(action,), name="inprocess-relay", daemon=True)
        thread.start()
        return thread

    # --- sending ------------------------------------------------------------------------------------------------

    def _send(self, member: int, iteration: int, readers: Iterable[int]) -> None:
        if all(self._is_here(slot) for slot in readers):
            return
        rank = Header(self._job, "rank", self._rank, self._pid)
        monitor = Header(self._job, "monitor", self._rank, os.getpid())
        with self._folder() as folder:
            mine = _tail(folder, file_name(rank))
        sources = [(rank, self._about(mine, iteration)), (monitor, self._about(stream.recent(), iteration))]
        if text := cut(sources).decode():
            self._with_store(lambda connection: execute(verbs.publish_digest(member, text), connection))

    def _about(self, events: Sequence[Event], iteration: int) -> list[Event]:
        return [each for each in events if each.call == self._call and each.iteration in (iteration, iteration + 1)]

    def _is_here(self, slot: int) -> bool:
        """Whether the events of this rank are written beside those of this one."""
        with self._folder() as folder:
            names = folder.names(re.compile(rf"rank-{slot}-.*"))
            return any(self._job == _job_of(folder, name) for name in names)

    def _folder(self) -> Folder:
        return own(self._run_dir, FOLDER)

    # --- fetching -----------------------------------------------------------------------------------------------

    def _fetch(self, slots: dict[int, int], removed: set[int]) -> None:
        gone, self._gone = self._gone, removed
        missing = [member for member, slot in slots.items() if not self._is_here(slot)]
        if not missing and not gone:
            return

        def action(connection: Any) -> None:
            for member in missing:
                self._keep(execute(verbs.read_digest(member), connection))
            for member in gone - removed:
                execute(verbs.drop_digest(member), connection)

        self._with_store(action)

    def _keep(self, data: bytes) -> None:
        """Lay it beside this process's own events."""
        if not data:
            return
        try:
            header, lines = lines_of(data, self._job)
        except ValueError as error:
            log.warning("the evidence of another rank cannot be read: %s", error)
            return
        if header is None:
            return
        with self._folder() as folder:
            name = file_name(header, RELAYED)
            there = {
                line
                for each in (f"{name}.1", name)
                for line in _read(folder, each, 2 * MAX_FILE_BYTES).splitlines(keepends=True)
            }
            new = b"".join(line for line in lines if line not in there or b'"format"' in line)
            if new.count(b"\n") <= sum(b'"format"' in line for line in lines):
                return  # nothing but headers
            with contextlib.suppress(FileNotFoundError):
                if folder.stat(name).st_size > MAX_FILE_BYTES:  # as a process does with its own, see `EventFile`
                    folder.rename(name, f"{name}.1")
            fd = folder.append(name)
        try:
            os.write(fd, new)
        finally:
            os.close(fd)


def _quietly(action: Callable[[], None]) -> None:
    """A report without a line is no reason to do anything else."""
    try:
        action()
    except Exception as error:
        log.info("evidence does not travel through the store: %s", error)


def _read(folder: Folder, name: str, size: int, end: bool = False) -> bytes:
    """The first bytes of a file, or the last ones; nothing where it is none."""
    try:
        fd = folder.open(name)
    except (FileNotFoundError, NotPrivate):
        return b""
    try:
        return os.pread(fd, size, max(0, os.fstat(fd).st_size - size) if end else 0)
    finally:
        os.close(fd)


def _tail(folder: Folder, name: str) -> list[Event]:
    events = []
    for line in _read(folder, name, TAIL_BYTES, end=True).splitlines():
        try:
            found = parse(line)
        except ValueError:  # the first one may be half a line
            continue
        if isinstance(found, Event):
            events.append(found)
    return events


def _job_of(folder: Folder, name: str) -> str | None:
    """Of the first header of a file."""
    try:
        found = parse(_read(folder, name, MAX_LINE_BYTES).partition(b"\n")[0])
    except ValueError:
        return None
    return found.job if isinstance(found, Header) else None
