"""Checkpoints on disk, for when no process has the state any more: torch.distributed.checkpoint, beside the training.

One folder each, ``step_00000500``. Its tensors are named like the parts, ``model.0.weight``, so torch's own tools read
it; all else is in one more tensor of bytes. What was written is read again and its checksums are kept, before torch
writes ``.metadata``: a folder without that is unfinished, one that differs from its checksums is damaged.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from inprocess.exception import LiveStateError, OptionError
from inprocess.live.copies import there
from inprocess.live.plan import NOTHING
from inprocess.live.transfer import PIECE, checksum
from inprocess.live.tree import Record, dotted, leaves, read, replaced, take
from inprocess.store import first_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from inprocess.live.present import Present

__all__ = ["Checkpoints", "Name"]

log = logging.getLogger("inprocess.live")
#: what torch writes last
METADATA = ".metadata"
#: the tensor with all that is none
REST = "inprocess"
#: how many are tried, should the newest ones be damaged
TRIED = 8


@dataclass(frozen=True, order=True)
class Name:
    """Of a checkpoint's folder. A step that is saved again after a restart gets another one: the first may be whole."""

    step: int
    iteration: int = 0

    def __str__(self) -> str:
        return f"step_{self.step:08d}" + (f"_i{self.iteration}" if self.iteration else "")

    @classmethod
    def of(cls, text: str) -> Name | None:
        found = re.fullmatch(r"step_(\d+)(?:_i(\d+))?", text)
        return cls(int(found[1]), int(found[2] or 0)) if found else None


@dataclass
class Staged:
    """A copy of a state that is to be written."""

    name: Name
    writer: Any
    state: dict[str, Any]


class Checkpoints:
    """A folder of checkpoints.

    Args:
        folder: a path, or what fsspec understands (``s3://bucket/run``); the same for all hosts.
        keep: how many are kept.
    """

    def __init__(self, folder: str, keep: int) -> None:
        self.folder = folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))
        self._keep = keep
        self._files, self._root = _open(self.folder)
        self._thread: threading.Thread | None = None
        #: the newest step that this rank has seen saved
        self.newest = NOTHING

    def __str__(self) -> str:
        return self.folder

    def path(self, name: Name) -> str:
        return f"{self.folder.rstrip('/')}/{name}"

    # --- what is there ----------------------------------------------------------------------------------------------

    def finished(self, after: int) -> list[int]:
        """The finished ones that are newer, as numbers: always the same many, the newest first."""
        names = sorted((name for name, finished in self._all() if finished and name.step > after), reverse=True)
        found = [number for name in names[:TRIED] for number in (name.step, name.iteration)]
        return found + [NOTHING] * (2 * TRIED - len(found))

    @staticmethod
    def names(numbers: Sequence[int]) -> list[Name]:
        return [Name(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True) if pair[0] != NOTHING]

    def _all(self) -> Iterator[tuple[Name, bool]]:
        """Each with whether it is finished."""
        self._files.invalidate_cache()
        if self._files.isdir(self._root):
            for entry in self._files.ls(self._root, detail=False):
                name = Name.of(entry.rstrip("/").rpartition("/")[2])
                if name is not None:
                    yield name, self._files.exists(f"{entry}/{METADATA}")

    def _remove(self, name: Name) -> None:
        path = f"{self._root}/{name}"
        if self._files.exists(f"{path}/{METADATA}"):  # first: what is left, should this fail, counts as unfinished
            self._files.rm_file(f"{path}/{METADATA}")
        if self._files.isdir(path):
            self._files.rm(path, recursive=True)

    # --- saving -----------------------------------------------------------------------------------------------------

    def stage(self, step: int, iteration: int, present: Present, family: str, leads: bool) -> Staged:
        """Copy the state to host memory.

        Args:
            family: put before each name; ranks with another one have other tensors of the same names.
            leads: this rank is the one of its family that writes what is no tensor.
        """
        name = Name(step, iteration)
        writer = _writer(self.path(name))
        return Staged(name, writer, writer.stage(_tensors(present, family, leads)))

    def begin(self, staged: Staged, group: weakref.ref[ProcessGroup] | None) -> None:
        """Write it, in a thread. All ranks do that for the same steps, each after `wait`.

        Args:
            group: of its own, on the host; None where there is one process.
        """
        self._thread = threading.Thread(
            target=self._save, args=(staged, group), name="inprocess-checkpoint", daemon=True
        )
        self._thread.start()

    def _save(self, staged: Staged, ref: weakref.ref[ProcessGroup] | None) -> None:
        name = staged.name
        try:
            group = there(ref) if ref is not None else None
            first = group is None or dist.get_rank(group) == 0
            if first:
                self._remove(name)  # of an earlier job, unfinished or damaged
            save(staged.state, storage_writer=staged.writer, process_group=group, no_dist=group is None)
        except (Exception, CheckpointException) as error:  # the disk is full, or the iteration is over
            log.error("the checkpoint of step %d is not finished: %s", name.step, _why(error))
            return
        self.newest = max(self.newest, name.step)
        if first:
            log.info("step %d is saved: %s", name.step, self.path(name))
            self._tidy(name)

    def _tidy(self, saved: Name) -> None:
        """Those before are removed but for the newest ones. What is later is of a future that did not come to be, and
        stays until this one gets there."""
        try:
            before = [(name, finished) for name, finished in self._all() if name <= saved]
            kept = sorted((name for name, finished in before if finished), reverse=True)[: self._keep]
            for name, _ in before:
                if name not in kept:
                    self._remove(name)
        except Exception as error:
            log.warning("old checkpoints in %s cannot be removed: %s", self, _why(error))

    def wait(self) -> None:
        """Until what was begun has ended, well or not."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    # --- loading ----------------------------------------------------------------------------------------------------

    def fault(self, name: Name, rank: int, size: int) -> str:
        """What is wrong with this rank's share of the files; empty: nothing."""
        path = f"{self._root}/{name}"
        try:
            metadata = _reader(self.path(name)).read_metadata()
            files = sorted({info.relative_path for info in metadata.storage_data.values()})
            kept: dict[str, Any] = {}
            for entry in self._files.ls(path, detail=False):
                if entry.endswith(SUMS):
                    kept |= json.loads(self._files.cat_file(entry))
            for file in files[rank::size]:
                if file not in kept:
                    return f"{file} has no checksums"
                with self._files.open(f"{path}/{file}", "rb") as stream:
                    if _sums(stream) != kept[file]:
                        return f"{file} is not what was written"
        except Exception as error:  # whatever pickle, JSON and the file system meet
            return f"{type(error).__name__}: {_why(error)}"
        return ""

    def load(self, name: Name, present: Present, family: str, group: ProcessGroup | None) -> None:
        """Into the parts. Collective. Raises LiveStateError where it does not fit them."""
        path = self.path(name)
        try:
            metadata = _reader(path).read_metadata()
            sizes = {key: item for key, item in metadata.state_dict_metadata.items() if hasattr(item, "size")}
            if family + REST not in sizes:
                raise LiveStateError(f"it has no {family + REST!r}: it was saved by ranks that were sharded otherwise")
            rest = {family + REST: torch.empty(tuple(sizes[family + REST].size), dtype=torch.uint8)}
            _load(rest, _reader(path), group)
            tree = read(bytes(rest[family + REST].untyped_storage()))
            present.check_names(tree)
            states = {
                part: _room(family + part, present.parts[part], skeleton, sizes)
                for part, skeleton in tree.items()
                if present.is_large(part)
            }
            _load(dict(_named(states, family)), _reader(path), group)
        except LiveStateError as error:
            raise LiveStateError(f"the checkpoint {path} does not fit: {error}") from error
        except (Exception, CheckpointException) as error:  # the second is a BaseException
            raise LiveStateError(f"the checkpoint {path} does not fit the parts: {_why(error)}") from error
        present.load(Record(tree | states, []))


# --- tensors by name --------------------------------------------------------------------------------------------------


def _tensors(present: Present, family: str, leads: bool) -> dict[str, torch.Tensor]:
    """All that is saved; DTensors as they are."""
    states = {name: part.state_dict() for name, part in present.parts.items()}
    large = {name: state for name, state in states.items() if present.is_large(name)}
    found = dict(_named(large, family))
    if leads:
        tree = {name: take(state).tree if name in large else state for name, state in states.items()}
        header = Record(tree, []).header()
        found[family + REST] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return found


def _named(states: Mapping[str, Any], family: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, leaf in leaves(states):
        yield family + dotted(path), leaf


def _room(name: str, part: Any, skeleton: Any, sizes: Mapping[str, Any]) -> Any:
    """A state like the skeleton, to be filled: of the part's own tensors, as they are sharded now, where it has them.

    An optimizer that has made no step has none: then like its parameters.
    """
    own = dict(leaves(part.state_dict()))
    params = [param for group in getattr(part, "param_groups", ()) for param in group["params"]]
    paths = iter([path for path, _ in leaves(skeleton)])

    def target(leaf: torch.Tensor) -> torch.Tensor:
        path = next(paths)
        if path in own:
            return own[path]
        size = tuple(sizes[dotted((name, *path))].size)
        if params and len(path) == 3 and isinstance(path[1], int) and params[path[1]].shape == size:
            return torch.zeros_like(params[path[1]], dtype=leaf.dtype)
        return torch.zeros(size, dtype=leaf.dtype)

    with torch.no_grad():
        return replaced(skeleton, target)


def _load(state: dict[str, Any], reader: Any, group: ProcessGroup | None) -> None:
    with torch.no_grad():
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)


# --- files ------------------------------------------------------------------------------------------------------------

#: how the file of a rank ends that says what is in its others: name -> sizes and checksums of pieces
SUMS = "sums.json"


class _Summed:
    """Has a storage writer of torch's keep checksums."""

    fs: Any
    path: Any

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)  # type: ignore[misc]
        sums = {}
        for file in sorted({result.storage_data.relative_path for result in done.wait()}):
            with self.fs.create_stream(self.fs.concat_path(self.path, file), "rb") as stream:
                sums[file] = _sums(stream)
        name = self.fs.concat_path(self.path, plan.storage_data.prefix + SUMS)
        with self.fs.create_stream(name, "wb") as stream:
            stream.write(json.dumps(sums).encode())
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # it is no file of this host
                stream.flush()
                os.fsync(stream.fileno())
        return done


class _Writer(_Summed, FileSystemWriter):
    """To a file system of this host."""


def _sums(stream: Any) -> list[int]:
    found: list[int] = []
    while data := stream.read(PIECE):
        found += [len(data), int(checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)))]
    return found


def _writer(path: str) -> Any:
    if "://" not in path:
        return _Writer(path)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # noqa: PLC0415

    class RemoteWriter(_Summed, FsspecWriter):
        pass

    return RemoteWriter(path)


def _reader(path: str) -> Any:
    if "://" not in path:
        return FileSystemReader(path)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: PLC0415

    return FsspecReader(path)


def _open(folder: str) -> tuple[Any, str]:
    """The file system, and the path there. Raises OptionError where there is none."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        files, path = url_to_fs(folder)
    except (ImportError, ValueError) as error:
        raise OptionError(f"folder={folder!r} cannot be opened: {error}") from error
    return files, path


def _why(error: BaseException) -> str:
    """In one line; where ranks failed, what the first of them said."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {_why(error)}"
    return first_line(error)
