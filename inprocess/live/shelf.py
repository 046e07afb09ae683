"""The folder of checkpoints: which are there, which was written last, which go, and which are moved aside.

A checkpoint is a folder, ``step_00000500``. Each one that is written gets a name that comes after all that are there,
so names tell the order also over relaunches. Where training went back behind a checkpoint, a new branch begins:
``step_00000450_b1`` comes after ``step_00000500``.

One that was found damaged becomes ``damaged_step_00000500``: it does not count any more. A few of these stay, to be
looked at. Any part of this may be cut off by the end of the process, and there are file systems without a rename; so
``.metadata``, without which a checkpoint is unfinished, goes first.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from inprocess.exception import OptionError
from inprocess.system import private_folder

__all__ = ["Name", "Shelf"]

#: what torch writes last
METADATA = ".metadata"
DAMAGED = "damaged_"
#: how many damaged ones stay
ASIDE = 2


@dataclass(frozen=True, order=True)
class Name:
    """Of a checkpoint's folder; the greater one was written later."""

    branch: int
    step: int

    def __str__(self) -> str:
        return f"step_{self.step:08d}" + (f"_b{self.branch}" if self.branch else "")

    @classmethod
    def of(cls, text: str) -> Name | None:
        found = re.fullmatch(r"step_(\d+)(?:_b(\d+))?", text)
        return cls(int(found[2] or 0), int(found[1])) if found else None

    @classmethod
    def after(cls, there: Iterable[Name], step: int) -> Name:
        """For a checkpoint of this step, where these are there."""
        last = max(there, default=cls(0, -1))
        return cls(last.branch + (step <= last.step), step)


class Shelf:
    """Reads and writes; may take long, or hang, as the disk does.

    Args:
        folder: a path, or what fsspec understands.
    """

    def __init__(self, folder: str) -> None:
        self.files, self.root = _open(folder)
        #: files of this host
        self.is_local = _is_local(self.files)

    def all(self) -> list[tuple[Name, bool]]:
        """Each with whether it is finished; the last one first."""
        names = ((Name.of(entry), entry) for entry in self._entries())
        found = [(name, self.files.exists(f"{self.root}/{entry}/{METADATA}")) for name, entry in names if name]
        return sorted(found, reverse=True)

    def finished(self, after: int) -> list[Name]:
        """Those that were written after this step was, the last one first; none of an older branch."""
        names = (name for name, finished in self.all() if finished)
        return list(itertools.takewhile(lambda name: name.step > after, names))

    def tidy(self, saved: Name, keep: int) -> None:
        """All that were written before this one go, except the last ``keep`` finished ones."""
        before = [(name, finished) for name, finished in self.all() if name <= saved]
        kept = [name for name, finished in before if finished][:keep]
        for name, _ in before:
            if name not in kept:
                self._remove(str(name))

    def tidy_unfinished(self, failed: Name) -> None:
        """What was left of this one, and of those before that nobody finished: the disk may be full."""
        for name, finished in self.all():
            if name <= failed and not finished:
                self._remove(str(name))

    def set_aside(self, names: Iterable[Name]) -> None:
        """Those of them that are there get another name; of all that have one the last few stay."""
        there = {name for name, _ in self.all()}
        for name in sorted(there.intersection(names)):
            self._remove(f"{DAMAGED}{name}")
            self._move(str(name), f"{DAMAGED}{name}")
        aside = [entry for entry in self._entries() if entry.startswith(DAMAGED)]
        aside.sort(key=lambda entry: Name.of(entry.removeprefix(DAMAGED)) or Name(-1, -1), reverse=True)
        for entry in aside[ASIDE:]:
            self._remove(entry)

    def _entries(self) -> Iterator[str]:
        self.files.invalidate_cache()
        if self.files.isdir(self.root):
            for entry in self.files.ls(self.root, detail=False):
                yield entry.rstrip("/").rpartition("/")[2]

    def _move(self, old: str, new: str) -> None:
        if self.is_local:
            with private_folder.own(self.root) as folder:
                folder.rename(old, new)
            return
        old, new = f"{self.root}/{old}", f"{self.root}/{new}"
        self.files.makedirs(new, exist_ok=True)
        if self.files.exists(f"{old}/{METADATA}"):
            self.files.mv(f"{old}/{METADATA}", f"{new}/{METADATA}")
        for entry in self.files.ls(old, detail=False):
            self.files.mv(entry, f"{new}/{entry.rpartition('/')[2]}")
        if self.files.exists(old):
            self.files.rm(old, recursive=True)

    def _remove(self, entry: str) -> None:
        if self.is_local:  # never through a link that somebody has put there
            with contextlib.suppress(FileNotFoundError), private_folder.own(self.root) as folder:
                folder.remove_tree(entry, first=METADATA)
            return
        path = f"{self.root}/{entry}"
        if self.files.exists(f"{path}/{METADATA}"):
            self.files.rm_file(f"{path}/{METADATA}")
        if self.files.isdir(path):
            self.files.rm(path, recursive=True)


def _is_local(files: Any) -> bool:
    """Not also one that is derived from it, which has operations of its own."""
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # noqa: PLC0415

    return type(files) is LocalFileSystem


def _open(folder: str) -> tuple[Any, str]:
    """The file system, and the path there. Raises OptionError where there is none."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        files, path = url_to_fs(folder)
    except (ImportError, ValueError) as error:
        raise OptionError(f"folder={folder!r} cannot be opened: {error}") from error
    return files, path.rstrip("/")
