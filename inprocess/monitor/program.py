"""The monitor program: protects one rank from the outside. Started with exec by ``process``.

It protects before it knows any store: the main thread waits on the training process's pidfd, a socket to it and timers,
and applies ``policy`` to the board. Everything that talks to a store is in ``link``; its threads post events.
Each wait has an end: the process goes when its rank has left the call (or is dead and accounted for) and no other
member needs a store that is served here, and at once when the store is lost and there is no rank left to protect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from inprocess.attribution import Interruption, InterruptionRecord, one_line
from inprocess.monitor import events, lease, policy, roles, stacks
from inprocess.monitor.board import ENDING, WATCHED, Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.dying import DyingRank
from inprocess.monitor.endings import codes, how_died
from inprocess.monitor.files import Files
from inprocess.monitor.link import Link
from inprocess.protocol import verbs
from inprocess.protocol.phases import LEAVING, RUNNING
from inprocess.system import cgroup, clock, descriptors, extensions, observers, procfs
from inprocess.system.json_lines import Lines, send_now
from inprocess.system.logs import Position, get_logger, locate
from inprocess.system.observers import emit

__all__ = ["Monitor", "main"]

log = get_logger("inprocess.monitor")
#: sent to whole process groups by people and schedulers; the training process decides what they mean, its monitor stays
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: how long a call that has ended waits for a store that was never reached (seconds)
STORE_LIMIT_S = 1.0
#: how long a call that failed waits for its monitor to have told the others (seconds)
LINGERING_NOTICE_S = 0.1
#: how long a monitor that ends with its rank may take to say so (seconds)
LAST_WORDS_S = 0.5
#: makes one; imported now, so that a program that is started ahead has done it
_WITNESS = extensions.first("Witness")
#: exit codes
DONE, FAILED, AGAIN = 0, 1, 2


class Monitor:
    """The main thread of the program. Everything here runs in it, ``post`` excepted."""

    def __init__(
        self, config: MonitorConfig, board: Board, control: socket.socket, training: int, predecessor: int = -1
    ):
        self._config, self._board, self._control, self._training = config, board, control, training
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (training, control.fileno(), self._wake):
            self._poll.register(fd, select.POLLIN)
        self._link = Link(config, board, self.post, predecessor)
        locate(self._position)
        observers.begin(config.run_dir, config.job, "monitor", config.rank)
        emit("watching", training_pid=config.training_pid)
        self._oom_kills = cgroup.oom_kills()
        self._last = DyingRank(config, board, training)
        self._board.slots[ENDING] = 0  # an earlier monitor may have died meanwhile
        self._is_process_one = config.training_pid == 1
        self._deadly = config.deadly_signal or int(signal.SIGKILL)
        self._view = policy.View(config.rank, self._link.limits, config.iteration)
        self._looked = clock.monotonic_ns()
        self._unheard = policy.LeaseWatch(config.heartbeat_timeout)
        self._lines = Lines()
        #: the rank is in the call and alive: the rules apply
        self._protecting = True
        self._joined = False
        #: it stays for members that may ask it where the job goes on, or use the store that it serves
        self._stands_by = False
        #: nothing more is to be said for this rank
        self._said_all = False
        #: since when the store is lost (ns)
        self._lost_at: int | None = None
        #: moments (s) with something to do then
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._exit: int | None = None
        self._completed = False
        view = roles.MonitorView(config, board, self._link, training, self.post, self._at)
        self._witness: roles.Witness = roles.NoWitness() if _WITNESS is None else _WITNESS(view)

    def post(self, event: events.Event) -> None:
        """Give the main thread an event; from any thread."""
        self._events.put(event)
        os.eventfd_write(self._wake, 1)

    def run(self) -> int:
        """Protect the rank until there is nothing left to do; returns the exit code."""
        self.tell(ready=os.getpid())
        self._link.start()
        self._witness.start()
        while self._exit is None:
            self._turn()
        return self._exit

    def _position(self) -> Position:
        """Of the rank, for log lines; any thread."""
        seen = self._board.snapshot()
        return Position(self._config.call, seen.iteration, seen.rank, self._config.rank, seen.phase.value)

    def tell(self, **message: Any) -> None:
        """Send a line to the training process."""
        send_now(self._control, message)

    # --- one turn -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        ready = dict(self._poll.poll(None if (sleep := self._sleep()) is None else descriptors.milliseconds(sleep)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while not self._events.empty():
            self._on_event(self._events.get())
        if self._training in ready:
            self._on_death()
        if self._control.fileno() in ready:
            self._on_control()
        now = clock.monotonic()
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()
        if self._protecting and self._exit is None:
            self._protect()

    def _sleep(self) -> float | None:
        """Seconds until the next turn, at most; None: only events matter."""
        now = clock.monotonic_ns()
        moments = [int(moment * 1e9) for moment, _ in self._timers]
        if self._protecting:
            moments.append(now + int(self._config.monitor_process_interval * 1e9))
            due = policy.wake_at(self._board.snapshot(), self._view)
            moments += [] if due is None else [due]
        # rounded up: waking a moment too early would mean waking twice
        return None if not moments else -((now - min(moments)) // 1_000_000) / 1e3

    # --- protecting the rank ------------------------------------------------------------------------------------

    def _protect(self) -> None:
        self._look_at_lease()
        now, seen = clock.monotonic_ns(), self._board.snapshot()
        if self._joined:  # not while torch is imported, which may take long and lets no other thread run
            self._board.slots[WATCHED] = now
        self._view = self._current_view(now, seen)
        for action in policy.decide(now, seen, self._view):
            if isinstance(action, policy.Report):
                self._view = dataclasses.replace(self._view, reported=action.iteration)
                silent = (now - (seen.ping or seen.progress)) / 1e9
                record = action.record.noticed(now / 1e9, clock.name(), silent)
                self._link.report(action.iteration, record)
                emit("no_progress", record=record.to_dict(), silent_for=silent)
                self._look_at_process()
                log.warning("iteration %d: %s", action.iteration, record)
            else:
                self._kill(dataclasses.replace(action, record=action.record.noticed(now / 1e9, clock.name())))

    def _look_at_lease(self) -> None:
        until, now = self._link.lease_until, clock.monotonic_ns()
        if self._lost_at is not None or until is None or not self._config.standby_stores:
            return
        if self._unheard.is_sure((until - now) / 1e9, now / 1e9):
            self._on_lost("no heartbeat gets through")

    def _current_view(self, now: int, seen: policy.Snapshot) -> policy.View:
        link, view = self._link, self._view
        iteration = link.membership.iteration if link.inside else verbs.JOINING
        interrupted, when = link.interrupted
        interrupted_at = when if interrupted == iteration else None
        # a gap this long: this process was stopped, perhaps together with its rank, whose silence then means nothing
        stopped = now - self._looked > view.limits.soft // 2 + int(self._config.monitor_process_interval * 1e9)
        self._looked = now
        return dataclasses.replace(
            view,
            iteration=iteration,
            interrupted_at=interrupted_at,
            atomic_at=now if seen.atomic and interrupted_at is not None else view.atomic_at,
            lease_until=None if link.ended.is_set() and link.removed_at is None else link.lease_until,
            cut_off_at=self._lost_at if link.removed_at is None else link.removed_at,
            awake_since=now if stopped else view.awake_since,
        )

    def _kill(self, kill: policy.Kill) -> None:
        self._view = dataclasses.replace(self._view, killed=True)
        record = self._last.killed = self._killed(kill.record)
        if not kill.at_once:
            self._look_at_process()
            self._take_stacks()
            if self._is_process_one:  # with which this process ends: the others are told before
                self._tell_end(record)
                self._link.report(self._board.snapshot().iteration, record)
                descriptors.await_readable(self._training, LAST_WORDS_S)
            was_leaving = self._board.snapshot().phase in LEAVING
            self._board.slots[ENDING] = 1
            self._end_rank(signal.SIGTERM if self._config.ends_by_sigterm else self._deadly)
            if not self._is_process_one:
                self._tell_end(record)
            if self._goes_within(self._config.grace, was_leaving):
                return
        self._end_rank(self._deadly)
        emit("killed", record=record.to_dict(), at_once=True)
        done = f"sent signal {self._deadly} to" if self._is_process_one else "killed"
        log.error("%s the training process %d: %s", done, self._pid, record)
        if not descriptors.await_readable(self._training, self._config.termination_grace_time):
            self._on_survival()

    def _goes_within(self, seconds: float, was_leaving: bool) -> bool:
        """Whether the process ends, or leaves the call: SIGTERM may have a handler that does that."""
        poll, until = select.poll(), clock.monotonic() + seconds
        poll.register(self._training, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        while (left := until - clock.monotonic()) > 0:
            if self._joined:
                self._board.slots[WATCHED] = clock.monotonic_ns()
            said = dict(poll.poll(descriptors.milliseconds(min(left, self._config.monitor_process_interval))))
            if self._training in said:
                return True
            if said and not self._on_control():
                poll.unregister(self._control)
            if not self._protecting:
                return True
            # the others know; from here on it is watched as any rank that leaves is
            if not was_leaving and self._board.snapshot().phase in LEAVING:
                self._board.slots[ENDING] = 0
                self._view = dataclasses.replace(self._view, killed=False)
                return True
        return False

    def _killed(self, record: InterruptionRecord) -> InterruptionRecord:
        """Why it is killed, in words that are true: whether process 1 can be is not known yet."""
        if not self._is_process_one:
            return record
        return dataclasses.replace(record, interruption=Interruption.UNRESPONSIVE)

    def _tell_end(self, record: InterruptionRecord) -> None:
        emit("killed", record=record.to_dict(), at_once=False)
        log.error("ending the training process %d: %s", self._pid, record)

    def _end_rank(self, signum: int) -> None:
        """With SIGCONT after it: a stopped process takes the signal first thing when it wakes."""
        self._signal(signum)
        self._signal(signal.SIGCONT)

    def _on_survival(self) -> None:
        """It was sent what ends it, and has not ended."""
        if not self._is_process_one:
            log.error("process %d did not exit after SIGKILL (a device driver?); it will never run again", self._pid)
            self._on_death()
            return
        self._link.end_lease()
        text = f"it is process 1 of its container and did not end by signal {self._deadly}: nothing in there can end it"
        log.error(
            "%s. The others go on without it; it begins no atomic(), and ends where it runs Python again. End the "
            "container from outside",
            text,
        )
        self._last.killed = InterruptionRecord(
            self._board.snapshot().rank, Interruption.UNRESPONSIVE, initial_rank=self._config.rank, message=text
        ).noticed(clock.monotonic(), clock.name())
        self._poll.unregister(self._training)
        self._go_on_without(self._board.snapshot(), text)

    @property
    def _pid(self) -> int:
        return self._config.training_pid

    def _look_at_process(self) -> None:
        """What the kernel says of the rank: stopped, waiting for a device, running."""
        emit("process", **procfs.state_of(self._pid))

    def _take_stacks(self) -> None:
        if self._config.stacks_signal and (threads := stacks.take(self._training, self._config)):
            emit("stacks", threads=threads)

    def _stacks_for_others(self) -> list[dict[str, Any]]:
        """Of a rank that runs and does not answer. While it is in the call it handles the signal: before it leaves, it
        waits until this thread has heard of that. One that is stopped would get the signal when it is healthy again."""
        is_there = self._protecting and not self._view.killed and not self._board.snapshot().left
        if not is_there or not self._config.stacks_signal or procfs.state_of(self._pid)["state"] not in ("R", "S"):
            return []
        return stacks.take(self._training, self._config)

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._training, signum)

    # --- what happened ------------------------------------------------------------------------------------------

    def _on_death(self) -> None:
        self._poll.unregister(self._training)
        if not self._protecting:
            return
        seen, status = self._board.snapshot(), self._last.status()
        how = how_died(status)
        log.warning("the training process %d is gone: %s", self._pid, how)
        if self._has_ended_itself(seen, status):
            log.error(lease.FENCED, self._pid)
        emit("died", how=how, **codes(status), oom_kills=cgroup.oom_kills() - self._oom_kills)
        self._go_on_without(seen, how)

    def _has_ended_itself(self, seen: policy.Snapshot, status: int | None) -> bool:
        """Whether it saw first that its lease had run out, see `lease`; it has no time to say so."""
        killed = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return killed and self._last.killed is None and seen.phase in RUNNING and lease.remaining(self._board) <= 0

    def _go_on_without(self, seen: policy.Snapshot, how: str) -> None:
        """This monitor speaks for its rank from now on."""
        self._witness.decided(seen.iteration, self._link.membership, None, {self._config.rank})
        self._witness.on_incident(seen.iteration, 1)
        self._finish(lambda: self._last.tell(self._link, how), self._config.barrier_timeout)

    def _on_control(self) -> bool:
        """What the rank says; False: it says nothing more."""
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:  # not death: only the pidfd tells that
            with contextlib.suppress(KeyError):  # it was known already
                self._poll.unregister(self._control)
            return False
        for message in self._lines.take(data):
            if isinstance(member := message.get("member"), int):
                self._link.identify(member)
            if "moves" in message:
                self._link.move()
            if "bye" in message and self._protecting:
                self._on_bye(one_line(str(message["bye"]), 20), one_line(str(message.get("why", "")), 400))
        return True

    def _on_bye(self, how: str, why: str) -> None:
        log.info("the rank has left the call (%s)", how)
        if how == "moved":
            membership = self._link.membership
            if membership.included:  # the store that was lost may have had a decision without this member
                self._witness.on_incident(membership.iteration, membership.roster.index(membership.member))
            self._protecting = False
            self._leave()
            return
        self._completed = how == "completed"
        if how != "failed":
            self._finish(self._link.say_gone, self._config.barrier_timeout)
            return
        text = f"left the call{': ' if why else ''}{why}"
        rank = self._board.snapshot().rank
        record = InterruptionRecord(rank, Interruption.TERMINATED, initial_rank=self._config.rank, message=text)
        record = record.noticed(clock.monotonic(), clock.name())
        self._finish(lambda: self._link.speak(record), self._config.termination_grace_time)
        self._at(LINGERING_NOTICE_S, lambda: self.tell(lingering=True))

    def _finish(self, last_words: Callable[[], None], patience: float) -> None:
        """The rank is no more: say so and go. A job that has not begun is waited for ``patience`` seconds."""
        self._protecting = False
        if self._lost_at is not None:
            self._leave()
            return
        self._link.give_up_after(STORE_LIMIT_S)
        self._at(patience, self._ask_begun)
        last_words()

    def _leave(self) -> None:
        """The store is lost, or this rank has gone on without it. Who votes here may still do so."""
        if not self._link.is_asked:
            self._exit = DONE
            return
        self._stands_by = True
        self.tell(lingering=True)
        self._at(self._link.patience, self._leave_unasked)

    def _leave_unasked(self) -> None:
        if not self._link.serves_again:
            self._exit = DONE

    def _ask_begun(self) -> None:
        if self._link.membership.iteration == verbs.JOINING:
            self._link.ask_begun()  # it may have been importing torch until now
            self._at(self._config.barrier_timeout, self._leave_unbegun)

    def _leave_unbegun(self) -> None:
        if self._link.membership.iteration == verbs.JOINING:
            log.warning("the job has not begun; no longer waiting for the others")
            self._exit = DONE

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((clock.monotonic() + seconds, action))

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.Serving(port):
                self.tell(serving=port)
            case events.Connected():
                self.tell(connected=True)
            case events.Joined():
                self._joined = True
                self.tell(joined=True)
                self._last.await_them(lambda: self.post(events.Dying()))
            case events.LinkLost(text):
                self._on_lost(text)
            case events.Crashed(text, option):
                self.tell(failed=text, option=option)
                self._exit = FAILED
            case events.HalfLoaded():
                self._exit = AGAIN
            case events.Spoken(member):
                self._on_spoken(member)
            case events.Interrupted(iteration, turn):
                self._witness.on_incident(iteration, turn)
            case events.StacksWanted(answer):
                answer(self._stacks_for_others())
            case _:
                self._on_end(event)

    def _on_end(self, event: events.Event) -> None:
        match event:
            case events.Dying():
                if self._protecting and self._lost_at is None:
                    self._last.foretell(self._link)
            case events.Decided(iteration, before, now, failed):
                self._witness.decided(iteration, before, now, failed)
            case events.Unbegun():
                self._leave_unbegun()
            case events.StandbyChanged():
                if self._stands_by and not self._link.is_asked:
                    self._exit = DONE
            case events.Over(True):
                self._exit = DONE
            case events.Over(False):
                self.tell(lingering=True)

    def _on_spoken(self, member: int) -> None:
        """Go, unless others need this process: those it speaks for would have to be missed once more."""
        self._said_all = self._said_all or member == self._link.member
        if not self._said_all:
            return
        if self._link.speaking:
            self.tell(lingering=True)
        elif self._link.is_host:
            self._link.linger()
        else:
            self._exit = DONE

    def leave(self) -> list[str] | None:
        """When the events have been written; the program that this process becomes, None: it ends."""
        can_end = self._witness.leave()
        if not can_end:
            self._give_back()
        command = self._witness.last(self._completed, can_end)
        if command is not None:  # the training process does not wait for it, and a next call may need the port
            self._link.stop_serving()
            self.tell(lingering=True, idle=True)
        return command

    def _give_back(self) -> None:
        """A thread may wait for a disk in a way that not even SIGKILL ends: then this process has not ended either, for
        who waits for that. So it closes the store's port, which a next call may need, and says that it stays."""
        for fd in procfs.sockets().values():
            if fd > 2 and fd != self._control.fileno():
                os.close(fd)
        self.tell(lingering=True, idle=True)

    def _on_lost(self, text: str) -> None:
        self._link.lose()
        if not self._protecting:
            log.info("the store is lost: %s", text)
            self._leave()
        elif self._lost_at is None and not self._link.ended.is_set():
            log.error("store lost: %s", text)
            emit("store_lost", text=text)
            self._lost_at = clock.monotonic_ns()


# --- the program -------------------------------------------------------------------------------------------------


def main(config_fd: int, control: int, board: int, training: int, predecessor: int) -> NoReturn:
    """Run one monitor with these inherited descriptors (-1: none) and end the process."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    config = read_config(config_fd)
    files = Files(config)
    monitor = Monitor(config, Board.attach(board), socket.socket(fileno=control), training, predecessor)
    code = FAILED
    try:
        if problem := files.open():
            monitor.tell(failed=problem, option=True)
        else:
            log.info("monitor of process %d, iteration %d", config.training_pid, config.iteration)
            code = monitor.run()
        if code == AGAIN:
            start_again(config_fd, config, files)
    except BaseException as error:
        shortage = descriptors.shortage(error)
        monitor.tell(failed=shortage or f"{type(error).__name__}: {error}", option=False)
        log.error("the monitor failed: %s", shortage or error, exc_info=not shortage)
    finally:
        try:
            observers.leave()
            command = monitor.leave()
            files.close()
            if command is not None:
                become(command)
        finally:
            os._exit(code)  # threads that wait inside torch, or for a disk, cannot be joined


def read_config(fd: int) -> MonitorConfig:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return MonitorConfig.from_json(file.read())


def start_again(config_fd: int, config: MonitorConfig, files: Files) -> NoReturn:
    """Become a fresh program with the same descriptors that imports all of torch."""
    os.ftruncate(config_fd, 0)
    with open(config_fd, "w", closefd=False) as file:
        file.seek(0)
        file.write(dataclasses.replace(config, full_torch=True).to_json())
    files.leave_to_another()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def become(command: list[str]) -> NoReturn:
    """This process goes on as that program, and nothing else of it: no thread, no descriptor. Raises OSError."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder is closed by now
            os.set_inheritable(int(name), False)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    os.execv(command[0], command)
