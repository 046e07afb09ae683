"""Checkpoints on disk, for when no process has the state any more: torch.distributed.checkpoint, beside the training.

One folder each, ``step_00000500``; their names and order are ``shelf``'s. Its tensors are named like the parts,
``model.0.weight``, so torch's own tools read it; all else is in one more tensor of bytes. What was written is read
again and its checksums are kept, before torch writes ``.metadata``: a folder without that is unfinished, one that
differs from its checksums is damaged.

The disk may be slow, or not answer at all. So nothing in here that touches it runs in the main thread, but `load`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from inprocess.exception import LiveStateError
from inprocess.live.beside import Beside
from inprocess.live.copies import there
from inprocess.live.plan import NOTHING
from inprocess.live.shelf import Name, Shelf
from inprocess.live.transfer import PIECE, checksum, view
from inprocess.live.tree import Record, dotted, is_sharded, leaves, local, read, replaced, take
from inprocess.system import private_folder
from inprocess.system.errors import first_line
from inprocess.system.logs import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

    from inprocess.live.present import LiveParts

__all__ = ["Checkpoints", "Name"]

log = get_logger("inprocess.live")
#: the tensor with all that is none
REST = "inprocess"
#: how many are tried, should the newest ones be damaged
TRIED = 8


@dataclass
class Staged:
    """A copy of a state that is to be written.

    Args:
        state: the tensors by name; of a DTensor the outline, without data.
        copies: the data of each.
    """

    step: int
    writer: Any
    state: dict[str, torch.Tensor]
    copies: dict[str, torch.Tensor]


class Checkpoints:
    """A folder of checkpoints.

    Args:
        folder: a path, or what fsspec understands (``s3://bucket/run``); the same for all hosts.
        keep: how many are kept.
        mode: of the folders that are made, on a file system of this host; of files without what only folders need.
    """

    def __init__(self, folder: str, keep: int, mode: int = 0o700) -> None:
        self._shelf = Shelf(folder if "://" in folder else os.path.abspath(os.path.expanduser(folder)))
        self.folder = self._shelf.root if self._shelf.is_local else folder
        self.keep, self._mode = keep, mode
        #: threads that write, and that look at what is there
        self.writer, self.reader = Beside("inprocess-checkpoint"), Beside("inprocess-reader")
        #: the newest step that this rank has seen saved
        self.newest = NOTHING
        #: the data of the last one that was staged, by name: room for the next one
        self._copies: dict[str, torch.Tensor] = {}
        #: found damaged by all ranks, and not yet known to be moved aside
        self._damaged: frozenset[Name] = frozenset()

    def __str__(self) -> str:
        return self.folder

    def path(self, name: Name) -> str:
        return f"{self.folder.rstrip('/')}/{name}"

    # --- what is there ----------------------------------------------------------------------------------------------

    def finished(self, after: int) -> list[int]:
        """The finished ones that are newer, as numbers: always the same many, the newest first."""
        found = [number for name in self._shelf.finished(after)[:TRIED] for number in (name.branch, name.step)]
        return found + self.nothing()[len(found) :]

    @staticmethod
    def nothing() -> list[int]:
        """As `finished`, where there is none."""
        return [NOTHING] * (2 * TRIED)

    @staticmethod
    def names(numbers: Sequence[int]) -> list[Name]:
        return [Name(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True) if pair[0] != NOTHING]

    def found_damaged(self, names: Sequence[Name], moves: bool) -> None:
        """They do not count any more.

        Args:
            moves: this is the rank that moves them aside. Where it does not come to that, it does with the next save.
        """
        self._damaged |= frozenset(names)
        if moves and names and self.writer.ended(0):
            self.writer.begin(max(names).step, self._move_aside)

    def _move_aside(self) -> None:
        self.writer.is_on_disk = self.writer.is_done = True
        try:
            self._shelf.set_aside(self._damaged)
        except Exception as error:
            log.warning("damaged checkpoints in %s cannot be moved aside: %s", self, _why(error))

    # --- saving -----------------------------------------------------------------------------------------------------

    def stage(self, step: int, present: LiveParts, family: str, leads: bool) -> Staged:
        """Copy the state to host memory: that of the one before, where the thread that writes it has ended.

        Args:
            family: put before each name; ranks with another one have other tensors of the same names.
            leads: this rank is the one of its family that writes what is no tensor.
        """
        writer = _writer(self.folder, self._mode)  # it hears of its own folder later
        writer.beside = self.writer
        rooms = self._copies if self.writer.ended(0) else {}
        state = _tensors(present, family, leads)
        self._copies = {name: _copy(local(tensor), rooms.pop(name, None)) for name, tensor in state.items()}
        outlines = {
            name: _outline(tensor) if is_sharded(tensor) else self._copies[name] for name, tensor in state.items()
        }
        return Staged(step, writer, outlines, self._copies)

    @property
    def nbytes(self) -> int:
        """Host memory for what is written, or was last."""
        return sum(copy.nbytes for copy in self._copies.values())

    def free(self) -> None:
        """Give that back, as soon as it is written: the call is over."""
        self._copies = {}

    def begin(self, staged: Staged, group: weakref.ref[ProcessGroup] | None) -> None:
        """Write it, in a thread. All ranks do that for the same steps, where no other one is being written.

        Args:
            group: of its own, on the host; None where there is one process.
        """
        self.writer.begin(staged.step, self._save, staged, group)

    def _save(self, staged: Staged, ref: weakref.ref[ProcessGroup] | None) -> None:
        step, name, group = staged.step, Name(NOTHING, staged.step), None
        try:
            group = there(ref) if ref is not None else None
            name = self._name(step, group)
            if group is not None and not dist.is_initialized():
                raise LiveStateError("the iteration is over")
            staged.writer.ranks = 1 if group is None else group.size()
            save(
                staged.state,
                checkpoint_id=self.path(name),
                storage_writer=staged.writer,
                planner=_Planner(staged.copies),
                process_group=group,
                no_dist=group is None,
            )
        except (Exception, CheckpointException) as error:  # the disk is full, or the iteration is over
            log.error("the checkpoint of step %d is not finished: %s", step, _why(error))
            # of torch's own error all ranks know: nobody writes any more
            if isinstance(error, CheckpointException) and name.branch != NOTHING and _is_first(group):
                self._quietly(lambda: self._shelf.tidy_unfinished(name))
            return
        self.newest = max(self.newest, step)
        self.writer.is_done = True
        if _is_first(group):
            log.info("step %d is saved: %s", step, self.path(name))
            self._quietly(lambda: self._shelf.tidy(name, self.keep))

    def _name(self, step: int, group: ProcessGroup | None) -> Name:
        """The first rank looks at what is there; it tells the others, also where it cannot."""
        name, fault, damaged = Name(NOTHING, step), "rank 0 cannot look into it", self._damaged
        if group is None or dist.get_rank(group) == 0:
            try:
                with on_disk(self.writer):
                    self._shelf.set_aside(damaged)
                    name = Name.after((name for name, _ in self._shelf.all()), step)
            except Exception as error:
                fault = _why(error)
        if group is not None:
            told = torch.tensor([name.branch])
            dist.broadcast(told, group=group, group_src=0)
            name = Name(int(told), step)
        if name.branch == NOTHING:
            raise LiveStateError(f"{self}: {fault}")
        self._damaged -= damaged  # on all ranks: this name, or one to come, may have been one of theirs
        return name

    def _quietly(self, tidy: Callable[[], object]) -> None:
        try:
            with on_disk(self.writer):
                tidy()
        except Exception as error:
            log.warning("old checkpoints in %s cannot be removed: %s", self, _why(error))

    # --- loading ----------------------------------------------------------------------------------------------------

    def fault(self, name: Name, rank: int, size: int) -> str:
        """What is wrong with this rank's share of the files; empty: nothing."""
        files, path = self._shelf.files, f"{self._shelf.root}/{name}"
        try:
            metadata = _reader(self.path(name)).read_metadata()
            written = sorted({info.relative_path for info in metadata.storage_data.values()})
            kept: dict[str, Any] = {}
            for entry in files.ls(path, detail=False):
                if entry.endswith(SUMS):
                    kept |= json.loads(files.cat_file(entry))
            for file in written[rank::size]:
                if file not in kept:
                    return f"{file} has no checksums"
                with files.open(f"{path}/{file}", "rb") as stream:
                    if _sums(stream) != kept[file]:
                        return f"{file} is not what was written"
        except Exception as error:  # whatever pickle, JSON and the file system meet
            return f"{type(error).__name__}: {_why(error)}"
        return ""

    def load(self, name: Name, present: LiveParts, family: str, group: ProcessGroup | None) -> None:
        """Into the parts. Collective. Raises LiveStateError where it does not fit them."""
        path = self.path(name)
        try:
            metadata = _reader(path).read_metadata()
            sizes = {key: item for key, item in metadata.state_dict_metadata.items() if hasattr(item, "size")}
            if family + REST not in sizes:
                raise LiveStateError(f"it has no {family + REST!r}: it was saved by ranks that were sharded otherwise")
            rest = {family + REST: torch.empty(tuple(sizes[family + REST].size), dtype=torch.uint8)}
            _load(rest, _reader(path), group)
            tree = read(bytes(view(rest[family + REST])))
            present.check_names(tree)
            states = {
                part: _room(family + part, present.parts[part], skeleton, sizes)
                for part, skeleton in tree.items()
                if present.is_large(part)
            }
            _load(dict(_named(states, family)), _reader(path), group)
            present.load(Record(tree | states, []))
        except LiveStateError as error:
            raise LiveStateError(f"the checkpoint {path} does not fit: {error}") from error
        except (Exception, CheckpointException) as error:  # the second is a BaseException
            raise LiveStateError(f"the checkpoint {path} does not fit the parts: {_why(error)}") from error


# --- tensors by name --------------------------------------------------------------------------------------------------


def _tensors(present: LiveParts, family: str, leads: bool) -> dict[str, torch.Tensor]:
    """All that is saved; DTensors as they are."""
    states = {name: part.state_dict() for name, part in present.parts.items()}
    large = {name: state for name, state in states.items() if present.is_large(name)}
    found = dict(_named(large, family))
    if leads:
        tree = {name: take(state).tree if name in large else state for name, state in states.items()}
        header = Record(tree, []).header()
        found[family + REST] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return found


def _copy(tensor: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
    """In that room, where it fits: memory that is new to the process costs five times as long as the copy."""
    if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
    return room.copy_(tensor)


def _outline(tensor: DTensor) -> DTensor:
    """One like it that has no data, and so keeps none of the training's alive."""
    return type(tensor).from_local(
        torch.empty_like(local(tensor), device="meta"),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class _Planner(DefaultSavePlanner):
    """Has torch plan with the outlines, and write the data.

    Args:
        copies: by name.
    """

    def __init__(self, copies: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._copies[index.fqn]


def _named(states: Mapping[str, Any], family: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, leaf in leaves(states):
        yield family + dotted(path), leaf


def _room(name: str, part: Any, skeleton: Any, sizes: Mapping[str, Any]) -> Any:
    """A state like the skeleton, to be filled: of the part's own tensors, as they are sharded now, where it has them.

    An optimizer that has made no step has none: then like its parameters.
    """
    own = dict(leaves(part.state_dict()))
    fixed = {key for key, _ in part.named_parameters()} if isinstance(part, torch.nn.Module) else set[str]()
    params = [param for group in getattr(part, "param_groups", ()) for param in group["params"]]
    paths = iter([path for path, _ in leaves(skeleton)])

    def target(leaf: torch.Tensor) -> torch.Tensor:
        path = next(paths)
        size, mine = tuple(sizes[dotted((name, *path))].size), own.get(path)
        if mine is not None and mine.shape != size and path[0] in fixed:
            raise LiveStateError(f"{dotted((name, *path))} has the size {size} there, and {tuple(mine.shape)} here")
        if mine is not None and mine.shape == size:
            return mine if mine.dtype == leaf.dtype else torch.zeros_like(mine, dtype=leaf.dtype)
        index = path[1] if len(path) == 3 else None
        if isinstance(index, int) and index < len(params) and params[index].shape == size:
            return torch.zeros_like(params[index], dtype=leaf.dtype)
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
    beside: Beside
    #: how many write together
    ranks = 1

    def prepare_global_plan(self, plans: Any) -> Any:
        # torch's `save` goes on as if the rank were alone where the default group is destroyed just before: what that
        # one rank has would look like a whole checkpoint
        if len(plans) != self.ranks:
            raise LiveStateError(f"the iteration is over: {self.ranks} ranks were to write it, and {len(plans)} did")
        return super().prepare_global_plan(plans)  # type: ignore[misc]

    def write_data(self, plan: Any, planner: Any) -> Any:
        with on_disk(self.beside):
            done = super().write_data(plan, planner)  # type: ignore[misc]
            self._write_sums(plan, done)
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        with on_disk(self.beside):
            super().finish(metadata, results)  # type: ignore[misc]

    def _write_sums(self, plan: Any, done: Any) -> None:
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


@contextlib.contextmanager
def on_disk(beside: Beside) -> Iterator[None]:
    """It is the disk that this one is at."""
    beside.is_on_disk = True
    try:
        yield
    finally:
        beside.is_on_disk = False


class _Writer(_Summed, FileSystemWriter):
    """To a file system of this host."""

    def __init__(self, path: str, mode: int) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # no stream to a device: it is all here
        self.fs = _Files(mode)


class _Files(FileSystem):
    """As torch's, but that the umask alone does not say who may read what is made.

    Args:
        mode: of folders; files have it without the right to execute.
    """

    def __init__(self, mode: int) -> None:
        self._mode = mode

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open(path, mode, opener=self._open) as stream:
            yield cast(io.IOBase, stream)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        private_folder.own(os.fspath(path), mode=self._mode).close()

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, self._mode & 0o666)


def _is_first(group: ProcessGroup | None) -> bool:
    """Not by dist.get_rank: the iteration may be over by now, and with it the default group."""
    return group is None or group.rank() == 0


def _sums(stream: Any) -> list[int]:
    found: list[int] = []
    while data := stream.read(PIECE):
        found += [len(data), int(checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)))]
    return found


def _writer(path: str, mode: int) -> Any:
    if "://" not in path:
        return _Writer(path, mode)

    class RemoteWriter(_Summed, _fsspec().FsspecWriter):  # type: ignore[misc]
        pass

    # what is no file of this host cannot be synchronized: it is there when its stream is closed (torch 2.14 warns)
    return RemoteWriter(path, per_thread_copy_ahead=0, sync_files=False)


def _reader(path: str) -> Any:
    if "://" not in path:
        return FileSystemReader(path)
    return _fsspec().FsspecReader(path)


def _fsspec() -> Any:
    """torch's module for other file systems; until 2.15 under a private name."""
    try:
        from torch.distributed.checkpoint import fsspec_filesystem  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_filesystem  # noqa: PLC0415
    return fsspec_filesystem


def _why(error: BaseException) -> str:
    """In one line; where ranks failed, what the first of them said."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {_why(error)}"
    return first_line(error)
