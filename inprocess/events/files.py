"""The events of one process as JSON lines in the run directory. All of it runs in the thread that writes.

Each line is one write to a file that is opened for appending, so it is whole whatever dies, and can be read at once.
Where the disk is full the next line begins anew; where it does not answer, only that thread waits.
"""

from __future__ import annotations

import contextlib
import os
import re

from inprocess.events.record import Event, Header, to_line
from inprocess.system import clock, private_folder
from inprocess.system.logs import get_logger

__all__ = ["FOLDER", "RELAYED", "EventFile", "file_name", "host_in_names"]

log = get_logger("inprocess")
#: a file that is larger (bytes) is set aside, in place of the one that was set aside before
MAX_FILE_BYTES = 4 << 20
#: seconds after which a file that could not be opened is tried again
RETRY_S = 5.0
#: the events are below this in the run directory
FOLDER = "events"
#: the role in the name of a file that came through the store, see ``relay``
RELAYED = "relayed"


def host_in_names(host: str) -> str:
    """A host as the names of its files have it."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", host)[:100]


def file_name(header: Header, role: str = "", ending: str = "jsonl") -> str:
    """Of the file of this process; ``role``: in place of its own."""
    return f"{role or header.role}-{header.initial_rank}-{host_in_names(header.host)}-{header.pid}.{ending}"


class EventFile:
    """One process's file. Made once per process and run directory, and used by one thread at a time."""

    def __init__(self, run_dir: str, header: Header) -> None:
        self.run_dir, self._header = run_dir, header
        self._name = file_name(header)
        self.path = os.path.join(run_dir, FOLDER, self._name)
        self._fd, self._size = -1, 0
        # the last write was cut short
        self._is_torn = False
        self._try_again_at = 0.0
        # the reasons that the log knows, and the latest one
        self._told: set[str] = set()
        self._reason = ""

    def write(self, event: Event) -> None:
        """Raises OSError where that failed; the first time for each reason the log says so."""
        try:
            if self._fd < 0:
                self._open()
            elif self._size > MAX_FILE_BYTES:
                self._set_aside()
            self._append(to_line(event))
        except OSError as error:
            self._reason = reason = error.strerror or str(error)
            if reason not in self._told:
                self._told.add(reason)
                log.warning(
                    "run_dir=%r: events are not written: %s. The training goes on without them; choose a directory "
                    "that can be written, or none.",
                    self.run_dir,
                    reason,
                )
            raise

    def _open(self) -> None:
        if clock.monotonic() < self._try_again_at:
            raise OSError(self._reason)
        self._try_again_at = clock.monotonic() + RETRY_S
        with private_folder.own(self.run_dir, FOLDER) as folder:
            self._fd = folder.append(self._name)
        self._size = os.fstat(self._fd).st_size
        self._is_torn = self._size > 0
        try:
            self._append(to_line(self._header))
        except OSError:
            self.close()  # no event comes before the header
            raise
        self._try_again_at = 0.0

    def _set_aside(self) -> None:
        with contextlib.suppress(FileNotFoundError), private_folder.own(self.run_dir, FOLDER) as folder:
            folder.rename(self._name, f"{self._name}.1")  # somebody may have taken it away
        self.close()
        self._open()

    def _append(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line  # an empty line is none
        self._is_torn = True
        written = os.write(self._fd, line)
        if written < len(line):
            raise OSError("only a part of a line could be written")
        self._is_torn = False
        self._size += written

    def close(self) -> None:
        """The next event opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
