"""The copy of a working directory in which a script runs: what the script writes there must not reach the user's files.

Small files are copied, of others there are links, which become copies before Python code writes to them. A folder
behind a link that leads elsewhere is copied in the same way. One that has too many files for that stays a link, and
nothing is written behind it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

__all__ = ["CHANGES", "WorkingCopies", "is_below", "keep_above_apart", "keep_apart"]

#: files up to so many bytes are copied, all together up to as many more; of others there are links
FILE, TOGETHER = 8 << 20, 64 << 20
#: of the working directory, so many files are there
FILES = 5000
#: audit events of what changes entries of a folder -> which of their arguments name these
CHANGES = {
    "os.link": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.symlink": (1,),
    "shutil.rmtree": (0,),  # names what is in there by descriptors
}


class WorkingCopies:
    """Of the folder ``home``."""

    def __init__(self, home: str) -> None:
        self._home = os.path.realpath(home)
        #: files of the working directory that the last copy does not have
        self.left_out = 0
        self._number, self._room = 0, TOGETHER
        # behind links: folders with too many files, and those that are being copied, for one may lead to another
        self._large, self._around = set[str](), [self._home]

    def make(self, target: Path) -> None:
        """The working directory without hidden folders and virtual environments."""
        self._number, self._room, self.left_out = 0, TOGETHER, 0
        self._target, self._made = target, os.path.realpath(target.parent)
        self._fill(self._home, target)

    def _fill(self, source: str, target: Path) -> None:
        for folder, below, files in os.walk(source):
            inside = target / os.path.relpath(folder, source)
            wanted = [name for name in below if self._wants(os.path.join(folder, name))]
            below[:] = wanted if self._number < FILES else []
            inside.mkdir(exist_ok=True)
            links = [name for name in below if os.path.islink(os.path.join(folder, name))]
            for name in [*files, *links]:
                self._number += 1
                if self._number > FILES:
                    self.left_out += 1
                else:
                    self._take(os.path.join(folder, name), inside / name)

    def _take(self, file: str, target: Path) -> None:
        real = os.path.realpath(file)
        if os.path.islink(file):
            if self._is_copied(real):
                os.symlink(self._target / os.path.relpath(real, self._home), target)
            elif os.path.isdir(real):
                self._take_folder(real, target)
            else:
                os.symlink(real, target)
        elif os.path.isfile(file):  # no socket, no pipe
            with contextlib.suppress(OSError):  # nobody may read it, or it is gone meanwhile
                size = os.path.getsize(file)
                if size <= min(FILE, self._room):
                    shutil.copyfile(file, target)
                    self._room -= size
                    return
            target.unlink(missing_ok=True)
            os.symlink(real, target)

    def _is_copied(self, real: str) -> bool:
        """What is below the working directory, but in none of the folders that are left out."""
        above = [str(each) for each in (Path(real), *Path(real).parents) if is_below(str(each), self._home)]
        return bool(above) and all(self._wants(each) for each in above if os.path.isdir(each))

    def _wants(self, folder: str) -> bool:
        """All but hidden folders, virtual environments, and that of the copies: somebody may work in /tmp."""
        name = os.path.basename(folder)
        is_left_out = name.startswith(".") or name == "__pycache__" or folder == self._made
        return not (is_left_out or os.path.exists(os.path.join(folder, "pyvenv.cfg")))

    def _take_folder(self, real: str, target: Path) -> None:
        leads_back = real == self._made or any(each == real or is_below(each, real) for each in self._around)
        if leads_back or real in self._large or not self._has_few_files(real):
            self._large.add(real)
            os.symlink(real, target)
            return
        self._around.append(real)
        self._fill(real, target)
        self._around.pop()

    def _has_few_files(self, folder: str) -> bool:
        left = FILES - self._number
        for _, below, files in os.walk(folder):
            left -= len(below) + len(files)
            if left < 0:
                return False
        return True


def keep_apart(path: str, folder: str) -> None:
    """Before a file of the copy ``folder`` is written: a link to a file elsewhere becomes a copy of that.

    Raises OSError as `keep_above_apart`.
    """
    keep_above_apart(path, folder)
    is_link = os.path.islink(path) and os.path.isfile(path)
    if is_link and is_below(os.path.abspath(path), folder) and not is_below(os.path.realpath(path), folder):
        beside = f"{path}.{os.getpid()}"
        shutil.copyfile(path, beside)
        os.replace(beside, path)


def keep_above_apart(path: str, folder: str) -> None:
    """Before an entry of a folder changes: raises OSError where a link leads from the copy to that folder elsewhere."""
    path = os.path.abspath(path)
    above = os.path.dirname(path)
    if is_below(above, folder) and not is_below(os.path.realpath(above), folder):
        raise OSError(
            errno.EROFS,
            "the doctor lets nothing be written behind a link to a folder with too many files to be copied, or that "
            "leads back: start it where there is no such link",
            path,
        )


def is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)
