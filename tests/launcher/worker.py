"""A worker that does what the test tells it, line by line. Imports no torch.

worker.py HUB [wrapped | wrapped-first] [tells]

With wrapped-first a process that replaces another one does not say that it is wrapped. With tells it says which modules
it has imported.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inprocess.watch import Watch

#: what must live as long as the worker
KEPT: list[Watch] = []
SHOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    hub = socket.socket(socket.AF_UNIX)
    hub.connect(sys.argv[1])
    if "wrapped" in sys.argv or ("wrapped-first" in sys.argv and "INPROCESS_RESTART" not in os.environ):
        from inprocess.watch import announce_wrapped

        announce_wrapped()
    if "tells" in sys.argv:
        from inprocess.heartbeats.launcher import announce_modules

        announce_modules()
    shown = {name: text for name, text in os.environ.items() if name in SHOWN or name.startswith("TORCHELASTIC_")}
    shown |= {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")}
    shown["INPROCESS_GROW"] = os.environ.get("INPROCESS_GROW", "")
    say(hub, pid=os.getpid(), restart=int(os.environ.get("INPROCESS_RESTART") or 0), env=shown, argv=sys.argv[2:])
    for line in hub.makefile():
        command, _, rest = line.strip().partition(" ")
        COMMANDS[command](hub, rest)


def say(hub: socket.socket, **message: object) -> None:
    hub.sendall(json.dumps(message).encode() + b"\n")


def leave(hub: socket.socket, code: str) -> None:
    sys.exit(int(code))


def kill(hub: socket.socket, number: str) -> None:
    os.kill(os.getpid(), int(number))


def show(hub: socket.socket, text: str) -> None:
    print(text, flush=True)
    print(f"error: {text}", file=sys.stderr, flush=True)
    say(hub, shown=True)


def limits(hub: socket.socket, _: str) -> None:
    say(hub, limits=resource.getrlimit(resource.RLIMIT_NOFILE))


def see(hub: socket.socket, _: str) -> None:
    """What a program can see of how it was started."""
    main = sys.modules["__main__"]
    names = {name: repr(vars(main)[name]) for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__")}
    say(
        hub,
        main=names | {name: type(vars(main)[name]).__name__ for name in ("__loader__", "__spec__", "__builtins__")},
        is_main=vars(main) is globals(),
        argv=[sys.argv, sys.orig_argv, sys.path, str(sys.flags), os.getcwd()],
        session=os.getsid(0) - os.getpid(),
        group=os.getpgrp() - os.getpid(),
        streams=[os.fstat(number).st_ino for number in range(3)],
        handlers={number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if number < 32},
        blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        ends_with=_parent_death_signal(),
        descriptors=len(os.listdir("/proc/self/fd")),
        finders=[getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        environ=[type(os.environ).__name__, dict(os.environ)],
        threads=threading.active_count(),
    )


def _parent_death_signal() -> int:
    import ctypes

    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)  # PR_GET_PDEATHSIG
    return found.value


def fail(hub: socket.socket, text: str) -> None:
    raise ValueError(text)


def ignore(hub: socket.socket, _: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: say(hub, got="SIGTERM"))
    say(hub, ignoring=True)


def obey(hub: socket.socket, _: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (say(hub, got="SIGTERM"), sys.exit(0)))
    say(hub, obeying=True)


def note(hub: socket.socket, number: str) -> None:
    signal.signal(int(number), lambda number, _: say(hub, got=signal.Signals(number).name))
    say(hub, noting=True)


def child(hub: socket.socket, _: str) -> None:
    """Start a process that would stay."""
    pid = os.fork()
    if pid == 0:
        hub.close()
        signal.pause()
    say(hub, child=pid)


def ask(hub: socket.socket, rest: str) -> None:
    from inprocess.watch import ask_launcher

    action, _, reason = rest.partition(" ")
    ask_launcher(action, reason)  # type: ignore[arg-type]


def over(hub: socket.socket, _: str) -> None:
    """As a wrapped function does that ends with an error on all ranks."""
    from inprocess.watch import announce_over

    announce_over()
    say(hub, over=True)


def again(hub: socket.socket, _: str) -> None:
    """As a wrapped function does that is called again."""
    from inprocess.watch import announce_wrapped

    announce_wrapped()
    say(hub, again=True)


def ping(hub: socket.socket, _: str) -> None:
    from inprocess.watch import monitored

    KEPT.append(monitored())  # a watch ends with its object
    say(hub, pinged=True)  # before: from now on it has little time
    KEPT[0].ping()


COMMANDS = {
    "exit": leave,
    "kill": kill,
    "show": show,
    "limits": limits,
    "see": see,
    "fail": fail,
    "ignore": ignore,
    "obey": obey,
    "note": note,
    "child": child,
    "ask": ask,
    "ping": ping,
    "over": over,
    "again": again,
}


if __name__ == "__main__":
    main()
