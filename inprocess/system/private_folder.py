"""A folder of this user's own: opened once, never through another's link, and all else relative to what was opened.

Whoever may write to a folder above it may put a link, or a folder, in its place. So the last folders of a path have to
belong to this user, and not everybody may write to them. A group may, as it is made on volumes of Kubernetes
(``fsGroup``). What is on the way there may be anybody's, except links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from types import TracebackType

__all__ = ["Folder", "NotPrivate", "look", "own"]

#: links on one path, as the kernel has it
MAX_LINKS = 40
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_CLOEXEC | os.O_NOCTTY
_ANY = re.compile(".*", re.DOTALL)
#: (file system, user id there) that are this user
_mapped: set[tuple[int, int]] = set()


class NotPrivate(OSError):
    """Somebody else's folder, file or link. The text names it, its owner, its mode, and the remedy."""


def own(path: str, *names: str, mode: int = 0o700) -> Folder:
    """The folder of these names below ``path``, each private; what is missing, also above, is made with this mode.

    Without names: ``path`` itself, which may be anybody's.

    Raises:
        NotPrivate: see there.
        OSError: it cannot be opened or made.
    """
    return _opened(path, names, mode)


def look(path: str, *names: str) -> Folder:
    """As `own`, where it is there already. Root may look at what belongs to others."""
    return _opened(path, names, None)


def _opened(path: str, names: tuple[str, ...], mode: int | None) -> Folder:
    user = os.geteuid()
    folder = Folder(_walk(path, mode), path, user, looks=mode is None and user == 0)
    for name in names:
        with folder:
            folder = folder.below(name, makes=mode is not None)
    return folder


class Folder:
    """An open folder. Names are of what lies in it, and never followed where they are links. All raise OSError.

    Args:
        fd: its descriptor, from now on this object's.
        path: for messages.
        owner: whose files are read.
        looks: folders below it may be anybody's.
    """

    def __init__(self, fd: int, path: str, owner: int, looks: bool) -> None:
        self._fd, self.path, self._owner, self._looks = fd, path, owner, looks

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    # --- folders ----------------------------------------------------------------------------------------------------

    def below(self, name: str, makes: bool = True) -> Folder:
        """A private folder in it; ``makes``: with mode 0700, where there is none."""
        path = os.path.join(self.path, name)
        try:
            fd = _place(name, self._fd, 0o700 if makes else None)
        except NotADirectoryError:
            what = "a link" if stat.S_ISLNK(self.stat(name).st_mode) else "no folder"
            raise NotPrivate(f"{path} is {what}: remove it, or choose another directory") from None
        found = os.fstat(fd)
        if found.st_mode & stat.S_IWOTH or not (self._looks or _is_own(fd, found)):
            os.close(fd)
            raise _refusal(path, found)
        return Folder(fd, path, found.st_uid, self._looks)

    # --- files ------------------------------------------------------------------------------------------------------

    def names(self, pattern: re.Pattern[str] = _ANY) -> list[str]:
        """Of what lies in it, as far as all of the name fits the pattern; in order."""
        fd = os.open(".", os.O_RDONLY | _FOLDER | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        try:
            return sorted(name for name in os.listdir(fd) if pattern.fullmatch(name))
        finally:
            os.close(fd)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def open(self, name: str) -> int:
        """A descriptor to read a file from: a regular one, of the folder's owner."""
        return self._checked(name, os.open(name, os.O_RDONLY | _FILE | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd))

    def append(self, name: str) -> int:
        """A descriptor to write to the end of a file with mode 0600, made where there is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | _FILE | os.O_NOFOLLOW | os.O_NONBLOCK
        return self._checked(name, os.open(name, flags, 0o600, dir_fd=self._fd))

    def update(self, name: str) -> int:
        """A descriptor to read and write a file that is there."""
        return self._checked(name, os.open(name, os.O_RDWR | _FILE | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd))

    def read(self, name: str, limit: int) -> bytes:
        """The first ``limit`` bytes of a file; -1: all."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(limit)

    def create(self, name: str) -> int:
        """A descriptor to write a new file with mode 0600."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _FILE, 0o600, dir_fd=self._fd)

    def replace(self, name: str, data: bytes) -> None:
        """In one step, with mode 0600. Only one process may write a name under the same process id."""
        beside = f"{name}.{os.getpid()}"
        self.remove(beside)  # its writer was killed, or became another program
        fd = self.create(beside)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            self.rename(beside, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(beside)
            raise

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """A file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_below(self, name: str, pattern: re.Pattern[str]) -> None:
        """The files of a private folder that fit the pattern, and the folder if nothing is left in it."""
        with contextlib.suppress(FileNotFoundError):
            with self.below(name, makes=False) as folder:
                for each in folder.names(pattern):
                    folder.remove(each)
            self.remove_empty(name)

    def remove_empty(self, name: str) -> None:
        os.rmdir(name, dir_fd=self._fd)

    def remove_tree(self, name: str, first: str = "") -> None:
        """A folder with all that is in it; ``first``: a file that goes before all else."""
        fd = _place(name, self._fd)
        try:
            if first:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(first, dir_fd=fd)
        finally:
            os.close(fd)
        # Python before 3.11 takes no descriptor; below that folder it uses descriptors itself
        shutil.rmtree(f"/proc/self/fd/{self._fd}/{name}")

    def _checked(self, name: str, fd: int) -> int:
        found = os.fstat(fd)
        path = os.path.join(self.path, name)
        if stat.S_ISREG(found.st_mode) and found.st_uid == self._owner:
            return fd
        os.close(fd)
        if stat.S_ISREG(found.st_mode):
            raise _refusal(path, found)
        raise NotPrivate(f"{path} is not a regular file")


# --- on the way -------------------------------------------------------------------------------------------------------


def _walk(path: str, mode: int | None) -> int:
    """The place of a folder; what is missing is made with this mode, if there is one.

    Links on the way there have to be root's, this user's, or of the owner of the folder that they lie in: whoever else
    may write to that folder leads nobody elsewhere.
    """
    fd, links = _place("/" if path.startswith("/") else "."), 0
    names = _parts(path)
    try:
        while names:
            name = names.pop()
            try:
                below = _place(name, fd, mode)
            except NotADirectoryError:
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
                target = _target(name, fd, path)
                names += _parts(target)
                below = _place("/" if target.startswith("/") else ".", fd)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def _parts(path: str) -> list[str]:
    """The last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _place(name: str, fd: int | None = None, mode: int | None = None) -> int:
    """A descriptor of a folder: enough for what is below it, not to list it. Raises NotADirectoryError."""
    flags = os.O_PATH | _FOLDER | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(name, flags, dir_fd=fd)
    except FileNotFoundError:
        if mode is None:
            raise
    with contextlib.suppress(FileExistsError):  # somebody was quicker
        os.mkdir(name, mode, dir_fd=fd)
    return os.open(name, flags, dir_fd=fd)


def _target(name: str, fd: int, path: str) -> str:
    """Of a link; what is none raises NotADirectoryError."""
    link = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if found.st_uid not in (0, os.geteuid(), os.fstat(fd).st_uid):
            raise NotPrivate(
                f"{name!r} in {path} is a link of uid {found.st_uid} in somebody else's folder, and you are uid "
                f"{os.geteuid()}: name what it leads to, or choose another directory"
            )
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _is_own(fd: int, found: os.stat_result) -> bool:
    """Whether it belongs to this user, under whatever number its file system has for it (NFS: root is nobody)."""
    if found.st_uid == os.geteuid() or (found.st_dev, found.st_uid) in _mapped:
        return True
    name = f".{secrets.token_hex(8)}.mine"
    try:
        mine = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _FILE, 0o600, dir_fd=fd)
    except OSError:
        return False
    try:
        os.unlink(name, dir_fd=fd)
        if os.fstat(mine).st_uid != found.st_uid:
            return False
    finally:
        os.close(mine)
    _mapped.add((found.st_dev, found.st_uid))
    return True


def _refusal(path: str, found: os.stat_result) -> NotPrivate:
    return NotPrivate(
        f"{path} belongs to uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; it has to be yours "
        f"(uid {os.geteuid()}), and not everybody may write to it: chmod o-w where it is yours, remove it, or choose "
        "another directory"
    )
