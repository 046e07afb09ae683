"""Where wrapped workers write their events: a directory that the user named, or one that the launcher makes.

The default is ``inprocess-runs/<time>-<name>`` below the working directory, where people look for it, and where all
nodes have it that share a file system. The nodes agree on its last part when they meet. A file system may not answer:
all that touches it runs in a thread, and the launcher waits for that only a little.

In each directory that was made here is a file ``.gitignore``. The launchers of the job hold a shared lock on it, so a
directory that no launcher uses any more can be told from one of a running job, and older ones are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from datetime import datetime

from inprocess.events.files import FOLDER, host_in_names
from inprocess.system import clock
from inprocess.system.logs import get_logger
from inprocess.system.private_folder import Folder, look, own

__all__ = ["KEPT", "VARIABLE", "RunDirectory", "chosen", "count_restarts", "new_name", "tidy"]

log = get_logger("inprocess.run")
VARIABLE = "INPROCESS_RUN_DIR"
#: below the working directory
PARENT = "inprocess-runs"
#: so many of the directories that were made here stay, the latest ones, and those of jobs that run
KEPT = 20
#: what says that there is to be none
OFF = ("", "none")
#: how long the launcher waits for a file system before the workers start, and at its end (seconds)
PATIENCE_S = 5.0
MARK = ".gitignore"
#: of a name that the user gave the job (characters)
MAX_NAME = 40
_NAME = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9._-]{1,40}")
_OF_RANKS = re.compile(r"rank-.*")
#: in a line of an event
_RESTART, _ABORT = b'"kind":"restart"', b'"kind":"abort"'
#: the number of a restart, and in which call
_NUMBER = re.compile(rb'"call":(\d{1,9}),[^\n]*"kind":"restart","attributes":\{"restart":(\d{1,9})\b')


def chosen(option: str | None, environ: Mapping[str, str]) -> str | None:
    """What the user said, the option before the variable: a path, an empty text (no directory), None (nothing)."""
    said = environ.get(VARIABLE) if option is None else option
    if said is None:
        return None
    return "" if said.strip() in OFF else os.path.abspath(said)


def new_name(run_id: str) -> str:
    """For a directory: the time, and the name of the job where the user gave it one."""
    given = re.sub(r"[^A-Za-z0-9._]+", "-", run_id)[:MAX_NAME].strip("-")
    return f"{datetime.fromtimestamp(clock.wall()):%Y%m%d-%H%M%S}-{given or secrets.token_hex(3)}"


class RunDirectory:
    """The directory of one job, as one launcher knows it.

    Args:
        said: see `chosen`.
        run_id: the name that the user gave the job, or an empty text.
    """

    def __init__(self, said: str | None, run_id: str) -> None:
        self._said, self._run_id = said, run_id
        #: None: there is none, or it is not chosen yet
        self.path = said or None
        self._is_open = False
        #: files of events that were there before this job
        self._earlier: frozenset[str] = frozenset()
        #: of the mark, with its lock; for the life of this process
        self._marks: list[int] = []

    def open(self, agree: Callable[[str, str], str]) -> None:
        """Before workers start; the first time it is made where that is to be done, and named in the log.

        Args:
            agree: takes a key and a proposal; returns the proposal that all nodes follow.
        """
        if self._is_open:
            return
        self._is_open = True
        if self._said is None:
            name = agree("run_dir", new_name(self._run_id))
            path = os.path.join(os.getcwd(), PARENT, name)
            why = f"{name!r} is no name" if not _NAME.fullmatch(name) else _within(lambda: self._make(path))
            if why:
                log.warning(
                    "there is no directory for events and reports: %s: %s. The job runs without one; choose one with "
                    "--run-dir DIR, or none with --run-dir none",
                    path,
                    why,
                )
                return
            self.path = path
        elif self.path is not None:
            _within(self._look)
        if self.path is not None:
            log.info("events and reports of this job: %s (inprocess report %s)", self.path, shlex.quote(self.path))

    def environment(self) -> dict[str, str]:
        """For the workers."""
        return {VARIABLE: self.path or OFF[-1]}

    def close(self) -> None:
        """The workers have ended: say what the user may want to read. A directory that nobody used goes again."""
        path = self.path
        if path is None:
            return
        found: list[tuple[int, bool]] = []
        _within(lambda: found.append(count_restarts(path, self._earlier)))
        restarts, aborted = found[0] if found else (0, False)
        if restarts or aborted:
            number = f"{restarts} restart{'' if restarts == 1 else 's'}"
            log.info("%s; inprocess report %s", number, shlex.quote(path))
        elif self._said is None:
            while self._marks:
                os.close(self._marks.pop())  # with its lock
            _within(lambda: _remove_unused(path))

    def _look(self) -> None:
        """In a thread, as what follows."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError), look(self.path, FOLDER) as folder:
                self._earlier = frozenset(folder.names())

    def _make(self, path: str) -> None:
        with own(*_parts(path)) as folder:
            fd = folder.append(MARK)
        self._marks.append(fd)
        if os.fstat(fd).st_size == 0:
            os.write(fd, b"*\n")
        with contextlib.suppress(OSError):  # a file system without locks; then nobody gets one to remove it either
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        threading.Thread(target=tidy, args=(os.path.dirname(path),), name="inprocess-tidy", daemon=True).start()


def _within(action: Callable[[], object]) -> str:
    """Do it in a thread of its own; returns why it failed, or an empty text."""
    said = ["it does not answer"]

    def run() -> None:
        try:
            action()
            said[:] = [""]
        except OSError as error:
            said[:] = [error.strerror or str(error)]

    thread = threading.Thread(target=run, name="inprocess-run-dir", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return said[0]


def count_restarts(run_dir: str, earlier: Collection[str] = ()) -> tuple[int, bool]:
    """How many restarts the ranks of this host saw, and whether the job ended for all of them.

    A process that was there at the end knows the number of the last one, also where the first ones are not in its files
    any more. ``earlier``: files of jobs before.
    """
    seen: dict[str, int] = {}
    #: of each process and call, the number of the last one
    last: dict[tuple[str, int], int] = {}
    aborted = False
    host = f"-{host_in_names(socket.gethostname())}-"
    with contextlib.suppress(OSError), look(run_dir, FOLDER) as folder:
        for name in folder.names(_OF_RANKS):
            if host not in name or name in earlier:
                continue
            data = _read(folder, name)
            one = name.removesuffix(".1")
            seen[one] = seen.get(one, 0) + data.count(_RESTART)
            aborted = aborted or _ABORT in data
            for call, number in ((int(call), int(number)) for call, number in _NUMBER.findall(data)):
                last[one, call] = max(number, last.get((one, call), 0))
    known = (sum(number for (of, _), number in last.items() if of == one) for one in seen)
    return max((*seen.values(), *known), default=0), aborted


def _read(folder: Folder, name: str) -> bytes:
    try:
        return folder.read(name, -1)
    except OSError:
        return b""


def _remove_unused(path: str) -> None:
    """Nobody wrote into it."""
    above, parent, name = _parts(path)
    with own(above, parent) as folder:
        with folder.below(name, makes=False) as unused:
            is_unused = set(unused.names()) <= {MARK} and not _is_in_use(unused)
        if is_unused:
            folder.remove_below(name, re.compile(re.escape(MARK)))
    with own(above) as folder:
        folder.remove_empty(parent)  # where it was the only one


def tidy(parent: str, kept: int = KEPT) -> None:
    """Remove what is older than the latest ones; not what runs, and nothing that was not made here."""
    with contextlib.suppress(OSError), own(*os.path.split(parent)) as folder:
        for name in folder.names(_NAME)[: -kept or None]:
            with contextlib.suppress(OSError):
                with folder.below(name, makes=False) as old:
                    is_in_use = _is_in_use(old)
                if not is_in_use:
                    folder.remove_tree(name)


def _is_in_use(folder: Folder) -> bool:
    """Whether a launcher works with it, or it was not made here."""
    try:
        fd = folder.update(MARK)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _parts(path: str) -> tuple[str, str, str]:
    """What it lies in, which may be anybody's; the folder of all of them; its own name."""
    parent, name = os.path.split(path)
    return *os.path.split(parent), name
