"""The log and the pid file of a monitor: private, and never through a link that somebody else has put there.

Nobody waits for a disk that does not answer, nor for a standard error that nobody reads. Files are opened, and the pid
file is removed, in a thread of their own; lines are written by the thread of `logs`. What protects the rank, and all of
torch, never writes where a write may block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable

from inprocess.monitor import pidfile
from inprocess.monitor.configuration import MonitorConfig
from inprocess.protocol.keys import JOINING
from inprocess.system import logs, observers, procfs

__all__ = ["Files"]

log = logs.get_logger("inprocess.monitor")
#: how long a disk is waited for before the rank is protected without it, and at the end (seconds)
PATIENCE = 1.0


class Files:
    """Of one monitor. Made, opened and closed once each, by its main thread."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        # may block, unlike the descriptor 2 from here on
        self._stderr = os.dup(2)
        _never_wait_for_stderr()
        self._output = _Output()
        self._problem = ""
        self._is_late = False
        self._opening = threading.Thread(target=self._open, name="inprocess-files", daemon=True)
        text = "%(asctime)s.%(msecs)03d monitor [%(process)d] of %(inprocess)s: %(levelname)s: %(message)s"
        self._output.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S", defaults={"inprocess": logs.NO_CALL}))
        logging.getLogger().addHandler(self._output)
        # without a file only what the training process cannot say itself
        log.setLevel(logging.ERROR if config.logfile is None else logging.INFO)

    def open(self) -> str:
        """What is wrong with an option, in words. Empty: nothing, or nothing yet: the log says it later.

        Only where a call begins: in one that runs a healthy rank would have to leave for want of a file.
        """
        self._opening.start()
        self._opening.join(PATIENCE)
        self._is_late = self._opening.is_alive()
        return self._problem

    def close(self) -> None:
        """Remove the pid file and write what is left of the log, as far as the disk answers."""
        if self._config.pidfile is not None:
            removing = threading.Thread(
                target=remove_pidfile, args=[self._config.pidfile], name="inprocess-pidfile", daemon=True
            )
            removing.start()
            removing.join(PATIENCE)
        logs.leave()

    def leave_to_another(self) -> None:
        """This process becomes another program: with the standard error that it was started with."""
        observers.leave()
        logs.leave()
        os.dup2(self._stderr, 2)

    def _open(self) -> None:
        config = self._config
        is_open = self._try("monitor_process_logfile", config.logfile, open_log)
        self._output.write_to(2 if is_open else self._stderr)
        if not self._problem:
            self._try("monitor_process_pidfile", config.pidfile, lambda path: write_pidfile(path, config.training_pid))

    def _try(self, name: str, path: str | None, write: Callable[[str], None]) -> bool:
        """Whether it is written; None: no such file is wanted."""
        if path is None:
            return False
        try:
            write(path)
        except OSError as error:
            text = f"{name}={path!r} cannot be written: {error}. Choose a path in a directory that exists and is yours."
            if self._config.iteration == JOINING and not self._is_late:
                self._problem = text
            else:
                log.error("%s", text)
            return False
        return True


class _Output(logging.Handler):
    """Writes each line at once, as soon as it is known where to. Its `emit` may block."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = -1
        self._known = threading.Event()

    def write_to(self, fd: int) -> None:
        """From now on to this descriptor."""
        self._fd = fd
        self._known.set()

    def emit(self, record: logging.LogRecord) -> None:
        self._known.wait()
        try:
            os.write(self._fd, f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except OSError as error:
            logs.lose(f"they could not be written: {error.strerror}")


def _never_wait_for_stderr() -> None:
    """What torch's C++ code, or Python itself, writes to the descriptor 2 is lost where nobody reads it."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        return
    fd = procfs.open_stderr()
    os.dup2(fd, 2)
    os.close(fd)


def open_log(path: str) -> None:
    """Make this file the standard error, so that C++ code writes to it, too. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        # a pipe or a socket that somebody else has put there would block, or tell him
        if not stat.S_ISREG(mode := os.fstat(fd).st_mode) and not stat.S_ISCHR(mode):
            raise OSError(f"{path} is not a regular file")
        os.dup2(fd, 2)
    finally:
        os.close(fd)


def write_pidfile(path: str, training_pid: int) -> None:
    """Write this process's id. A file that a dead monitor, or one of the same training process, left is replaced.

    Raises:
        OSError: it cannot be written, names a live process of another rank or job, or holds something else than a
            process id.
    """
    with contextlib.suppress(FileNotFoundError):
        other = pidfile.read(path)
        if other is not None and _is_foreign(other, training_pid):
            raise FileExistsError(
                f"{path} names process {other}, which is alive and of another rank or job. Where several ranks are on "
                "one host, the path needs {rank}"
            )
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{os.getpid()}\n")
    except OSError:  # the disk is full
        os.unlink(path)
        raise


def remove_pidfile(path: str) -> None:
    """Remove the file unless it is another process's by now."""
    with contextlib.suppress(OSError):
        if pidfile.read(path) == os.getpid():
            os.unlink(path)


def _is_foreign(pid: int, training_pid: int) -> bool:
    """Whether a pid file's process is a live monitor, and not of this training process."""
    fields = pidfile.stat_fields(pid)
    if not fields or fields[0] in "ZX" or pid == os.getpid() or int(fields[1]) == training_pid:
        return False
    return pidfile.is_monitor(pid)
