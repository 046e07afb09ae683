"""States on the way from one rank to another, over a process group.

A state goes as its header and the bytes of each tensor, in pieces, and at the end the checksums of all of them. A rank
that fails in the middle interrupts the iteration like any other fault; whoever was receiving has a torn state then.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from inprocess.exception import LiveStateError
from inprocess.live.tree import Record, local, put
from inprocess.system.logs import get_logger
from inprocess.system.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = get_logger("inprocess.live")
#: bytes that are sent at once
PIECE = 1 << 26
#: how many more a receiver has asked for while it waits for one: the sender sends none before, and is not to wait
AHEAD = 2
#: numbers that are summed together for a checksum
BLOCK = 1 << 12


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, without a copy where it lies in one piece."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Of bytes; a number. Finds what a fault of memory or network changes, at the speed of memory; no defence.

    Sums of 64-bit words by blocks, and of these, each times an odd number of its own: a block in another place counts.
    """
    if data.storage_offset() % 8:  # in the middle of a larger tensor: no words begin here
        data = data.clone()
    whole = data.numel() // (8 * BLOCK) * 8 * BLOCK
    sums = data[:whole].view(torch.int64).view(-1, BLOCK).sum(1)
    odd = 2 * torch.arange(len(sums), device=data.device) + 1
    rest = data[whole:].to(torch.int64)
    return (sums * odd).sum() + (rest * (2 * torch.arange(len(rest), device=data.device) + 1)).sum() + data.numel()


def digest(state: Any) -> int:
    """Of what a state_dict() holds; a number that is equal where the content is. Of other objects the type counts."""
    found = hashlib.sha256()
    _feed(found.update, state)
    return int.from_bytes(found.digest()[:8], "little", signed=True)


def _feed(update: Callable[[bytes], object], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        mine = local(value)
        update(f"{mine.dtype} {tuple(mine.shape)} {0 if mine.is_meta else int(checksum(flat(mine)))};".encode())
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            update(f"{key!r}:".encode())
            _feed(update, inner)
    elif isinstance(value, list | tuple):
        update(f"{len(value)}[".encode())
        for inner in value:
            _feed(update, inner)
    else:
        plain = value is None or isinstance(value, int | float | str | bytes)
        update(f"{value!r};".encode() if plain else f"{type(value).__name__};".encode())


@dataclass
class Posted:
    """Something that is being sent, and has to live until then."""

    data: torch.Tensor
    work: Any

    def wait(self) -> None:
        self.work.wait()


class Arriving(NamedTuple):
    """A piece that is being received, and what of it the group receives into: another one where it cannot into that."""

    piece: torch.Tensor
    carried: torch.Tensor
    work: Any


class Wire:
    """Point to point between ranks of a group."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        #: device types that the group can send from; Gloo can from the host alone
        self._devices = {
            device
            for device, _, backend in (kind.partition(":") for kind in dist.get_backend_config(group).split(","))
            if device == "cpu" or backend != "gloo"
        }

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """It, or a copy where the group cannot send from where it is."""
        return tensor if tensor.device.type in self._devices else tensor.to(self._other())

    def _other(self) -> torch.device:
        return torch.device("cpu") if "cpu" in self._devices else torch.device("cuda", torch.cuda.current_device())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank says, by rank; all say equally much."""
        mine = self.carry(torch.tensor(numbers, dtype=torch.int64))
        size = dist.get_world_size(self._group)
        found = torch.empty(size, len(numbers), dtype=torch.int64, device=mine.device)
        dist.all_gather(list(found), mine, group=self._group)
        rows: list[list[int]] = found.tolist()
        return rows

    def send(self, record: Record, header: bytes, to: int) -> None:
        for post in self.post(record, header, to):
            post.wait()

    def post(self, record: Record, header: bytes, to: int) -> list[Posted]:
        """Begin to send; the data must not change until all has been waited for."""
        posted = self.post_numbers([len(header)], to)
        posted.append(self._post(torch.frombuffer(bytearray(header), dtype=torch.uint8), to))
        sums: list[torch.Tensor] = []
        for piece in pieces(record.tensors):
            posted.append(self._post(piece, to))
            sums.append(checksum(posted[-1].data))
        posted.append(self._post(_together(sums), to))
        return posted

    def post_numbers(self, numbers: Sequence[int], to: int) -> list[Posted]:
        return [self._post(torch.tensor(numbers, dtype=torch.int64), to)]

    def _post(self, data: torch.Tensor, to: int) -> Posted:
        carried = self.carry(data)
        return Posted(carried, dist.isend(carried, group=self._group, group_dst=to))

    def receive_numbers(self, count: int, source: int) -> list[int]:
        numbers = self.carry(torch.zeros(count, dtype=torch.int64))
        dist.recv(numbers, group=self._group, group_src=source)
        found: list[int] = numbers.tolist()
        return found

    def receive_header(self, source: int) -> bytes:
        (size,) = self.receive_numbers(1, source)
        data = self.carry(torch.empty(size, dtype=torch.uint8))
        dist.recv(data, group=self._group, group_src=source)
        data = data.cpu()
        return bytes(view(data))  # a storage hands out its bytes one by one, each in a microsecond

    def receive(self, record: Record, source: int, what: str) -> None:
        """Into the record's tensors. Raises LiveStateError where something else arrived than was sent."""
        shown = Shown(what, record.bytes)
        sums: list[torch.Tensor] = []
        under_way: deque[Arriving] = deque()

        def settle() -> None:
            piece, carried, work = under_way.popleft()
            work.wait()
            if carried is not piece:
                piece.copy_(carried)
            sums.append(checksum(piece))
            shown.more(piece.numel())

        with in_one_piece(record.tensors) as rooms:
            for piece in pieces(rooms):
                carried = piece if piece.device.type in self._devices else torch.empty_like(piece, device=self._other())
                under_way.append(Arriving(piece, carried, dist.irecv(carried, group=self._group, group_src=source)))
                if len(under_way) > AHEAD:
                    settle()
            while under_way:
                settle()
            mine = _together(sums)
            theirs = self.carry(torch.empty_like(mine))
            dist.recv(theirs, group=self._group, group_src=source)
            compare(mine.cpu(), theirs.cpu(), what)


def gather(wire: Wire | None, numbers: Sequence[int]) -> list[list[int]]:
    """What every rank says, by rank; without torch.distributed there is this one."""
    return wire.gather(numbers) if wire is not None else [list(numbers)]


def compare(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Raises LiveStateError where checksums differ."""
    if not torch.equal(mine, theirs):
        raise LiveStateError(f"{what}: {int((mine != theirs).sum())} of {len(mine)} pieces arrived damaged")


class Shown:
    """Says how far a long transfer is."""

    def __init__(self, what: str, size: int) -> None:
        self._what, self._size, self._done = what, size, 0
        self._progress = Progress()

    def more(self, size: int) -> None:
        self._done += size
        if self._progress.due():
            done, rate = self._done / 1e9, self._done / 1e9 / self._progress.seconds
            log.info("%s: %.1f of %.1f GB, %.2f GB/s", self._what, done, self._size / 1e9, rate)


@contextlib.contextmanager
def in_one_piece(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Room to receive into: the tensors, and in place of each that `flat` copies, as of images with the channels last,
    another one, which is put there in the end."""
    rooms = [
        tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in tensors
    ]
    yield rooms
    with torch.no_grad():
        for tensor, room in zip(tensors, rooms, strict=True):
            if room is not tensor:
                put(tensor, room)


def view(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory that lies in one piece; it has to live as long as that."""
    return memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if tensor.numel():
            yield from torch.split(flat(tensor), PIECE)


def _together(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Checksums, on the host. What an optimizer has may be on several devices; from each it is one copy."""
    found = torch.zeros(max(1, len(sums)), dtype=torch.int64)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found[places] = torch.stack([sums[place] for place in places]).cpu()
    return found
