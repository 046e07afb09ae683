"""What a worker tells its launcher, or asks it for."""

from __future__ import annotations

import builtins
import functools
import json
import os
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from inprocess.attribution import one_line
from inprocess.call.part import CallContext, CallEnd, Part
from inprocess.exception import NobodyLeft, OptionError, RestartError, TimeoutError
from inprocess.heartbeats.messages import ACTIONS, MAX_LINE_BYTES, MAX_REASON_LENGTH, Action
from inprocess.heartbeats.modules import Modules
from inprocess.monitor.starting import memory_file
from inprocess.options import did_you_mean
from inprocess.system import environment, strict_json
from inprocess.system.logs import get_logger

__all__ = [
    "ANSWER_TIMEOUT_S",
    "announce_modules",
    "announce_nobody_left",
    "announce_over",
    "announce_wrapped",
    "ask",
    "ask_launcher",
]

log = get_logger("inprocess")
#: how long a launcher may take to answer (seconds), and to listen to what needs no answer
ANSWER_TIMEOUT_S, LISTEN_TIMEOUT_S = 10.0, 1.0


def announce_wrapped(own_store: bool = False) -> None:
    """Tell the launcher that a Wrapper looks after this process. Nothing happens without one, or when it is gone.

    ``own_store``: its ranks do not agree through the launcher's store, so that may be lost.
    """
    _announce({"say": "wrapped", "own_store": own_store})


def announce_modules() -> None:
    """Tell the launcher which modules this process has imported, where it wants to know: see `heartbeats.modules`.

    Once in a process.
    """
    if environment.LAUNCHER_LEARNS not in os.environ:
        return
    environment.put_back({environment.LAUNCHER_LEARNS: None})
    try:
        fd = memory_file(Modules.here().text())
    except OSError as error:
        log.debug("the launcher cannot be told of modules: %s", error)
        return
    try:
        _announce({"say": "modules"}, fd)
    finally:
        os.close(fd)


def announce_nobody_left(error: RestartError) -> None:
    """Tell the launcher that this process found nobody to join, and will fail: it is to restart all workers.

    Where it has heard that, this is the normal way to recovery: if the error then ends the process, one line says so
    instead of a traceback. The exit code is that of any exception.
    """
    if _announce({"say": "nobody left"}):
        sys.excepthook = functools.partial(_in_one_line, weakref.ref(error), sys.excepthook)


def announce_over() -> None:
    """Tell the launcher that the call ends with an error on all ranks: a process that replaces one has nothing to join.

    Until this process calls a wrapped function again.
    """
    _announce({"say": "call over"})


def _in_one_line(
    expected: weakref.ref[RestartError],
    otherwise: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    if error is not expected():
        otherwise(kind, error, traceback)
        return
    rank = os.environ.get("RANK")
    sys.stderr.write(f"rank {rank} (pid {os.getpid()}): {error.args[0]} The launcher restarts all workers.\n")


def _announce(message: dict[str, Any], *fds: int) -> bool:
    """Whether there is a launcher, and it was told."""
    address = environment.launcher()
    if address is None:
        return False
    try:
        with _connect(address[0], LISTEN_TIMEOUT_S) as connection:
            _send(connection, _line(address[1], message), fds)
    except OSError as error:
        log.debug("the launcher could not be told %s: %s", message["say"], error)
        return False
    return True


def ask_launcher(action: Action, reason: str) -> None:
    """Ask the launcher that started this process for something that concerns the whole node or job.

    Args:
        action: ``"continue"``: go on, there is only something for the log; ``"exclude_this_node"``: end the workers of
            this node and leave the job; ``"shutdown_workload"``: end the job on all nodes.
        reason: for the launcher's log and its exit message; cut after 1000 characters.

    When this returns the launcher has heard it. It acts on it soon afterwards.

    Raises:
        OptionError: no launcher of this library started this process, the action is unknown or the reason is empty.
        TimeoutError: the launcher does not answer within 10 s.
        RestartError: it cannot be reached, or refuses.
    """
    if action not in ACTIONS:
        hint = did_you_mean(str(action), ACTIONS) or f": known actions: {', '.join(ACTIONS)}"
        raise OptionError(f"ask_launcher: unknown action={action!r}{hint}")
    if not isinstance(reason, str) or not reason.strip():
        raise OptionError(f"ask_launcher: reason={reason!r} must say why, for the launcher's log: pass some words")
    address = environment.launcher()
    if address is None:
        raise OptionError(
            f"ask_launcher({action!r}): no launcher of inprocess started this process (INPROCESS_LAUNCHER is not set): "
            "start it with `inprocess run`"
        )
    message = {"say": "ask", "action": action, "reason": one_line(reason, MAX_REASON_LENGTH)}
    try:
        connection, _ = ask(address, message)
        connection.close()
    except builtins.TimeoutError as error:
        raise TimeoutError(
            f"ask_launcher({action!r}): the launcher did not answer within {ANSWER_TIMEOUT_S:g} s"
        ) from error
    except (OSError, ValueError) as error:
        raise RestartError(f"ask_launcher({action!r}): the launcher cannot be reached: {error}") from error


def _connect(path: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _line(key: str, message: dict[str, Any]) -> bytes:
    return json.dumps({"key": key, **message}).encode() + b"\n"


def _send(connection: socket.socket, line: bytes, fds: Sequence[int]) -> None:
    sent = socket.send_fds(connection, [line], list(fds)) if fds else 0
    connection.sendall(line[sent:])


def ask(address: tuple[str, str], message: dict[str, Any], *fds: int) -> tuple[socket.socket, dict[str, Any]]:
    """Send a message, with descriptors; the connection, and the answer.

    Raises OSError and ValueError where no answer comes, RestartError where the launcher refuses.
    """
    connection = _connect(address[0], ANSWER_TIMEOUT_S)
    try:
        _send(connection, _line(address[1], message), fds)
        reply = strict_json.parse(_answer(connection))
        if not isinstance(reply, dict):
            raise ValueError(f"{reply!r:.100} is no answer")
        if reply.get("ok") is not True:
            raise RestartError(f"the launcher refused: {one_line(str(reply.get('why')), 300)}")
        return connection, reply
    except BaseException:
        connection.close()
        raise


def _answer(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        piece = connection.recv(4096)
        if not piece or len(received) > MAX_LINE_BYTES:
            raise ConnectionError("it hung up")
        received += piece
    return received


def _begin(call: CallContext) -> None:
    announce_wrapped(call.own_store)
    announce_modules()


def _end(end: CallEnd) -> None:
    if isinstance(end.error, NobodyLeft):
        announce_nobody_left(end.error)


part = Part(call_begins=_begin, everybody_leaves=announce_over, call_ends=_end)
