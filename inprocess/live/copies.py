"""Copies of a state in host memory: a rank's own, and those that it keeps for another one.

Of each there are two: while one is overwritten the other one is whole. A copy counts from when all of it is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from inprocess.exception import LiveStateError
from inprocess.live.beside import Beside
from inprocess.live.plan import NO_COPY, NOWHERE, Copy, Point
from inprocess.live.transfer import Wire
from inprocess.live.tree import Record, leaves, read
from inprocess.system.logs import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = get_logger("inprocess.live")
#: each tensor begins at a multiple of this (bytes), so that any type can be read there
ALIGNED = 64


class Buffer:
    """Room for one state, in one piece of host memory that is kept for the next one."""

    def __init__(self) -> None:
        #: what is here, all of it; `NO_COPY`: nothing
        self.held = NO_COPY
        #: what a copy that is under way will be, and what tells that it is there
        self._under_way: tuple[Copy, Sequence[Any]] | None = None
        self.header = b""
        self.record = Record({}, [])
        self._data = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def lay_out(self, tree: Any, header: bytes) -> Record:
        """Make room for a state, to be filled; what was here before is gone."""
        self.settle()
        self.held, self.header = NO_COPY, header
        shapes = [leaf for _, leaf in leaves(tree)]
        ends = [0]
        for leaf in shapes:
            ends.append(ends[-1] + -(-leaf.nbytes // ALIGNED) * ALIGNED)
        if len(self._data) < ends[-1]:
            self._data = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        places = zip(ends, shapes, strict=False)
        views = [self._data[at : at + leaf.nbytes].view(leaf.dtype).view(leaf.shape) for at, leaf in places]
        self.record = Record(tree, views)
        return self.record

    def holds_after(self, events: Sequence[Any], copy: Copy) -> None:
        """All of it is there as soon as these have happened."""
        self._under_way = copy, events

    def settle(self) -> None:
        """Wait for a copy that is under way."""
        if (under_way := self._under_way) is None:
            return
        copy, events = under_way
        try:
            for event in events:
                event.synchronize()
        except RuntimeError as error:  # the device is lost, and the copy with it
            log.warning("the copy of step %d did not get to host memory: %s", copy.step, error)
        else:
            self.held = copy
        self._under_way = None


class Copies:
    """Two buffers; the older one is overwritten next. After a restart in which not all ranks had made the newer one,
    that one is."""

    def __init__(self) -> None:
        self.buffers = (Buffer(), Buffer())
        #: all ranks have this one, and none after it
        self._spared = NOWHERE
        #: beside the training, by device
        self._streams: dict[torch.device, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def next(self) -> Buffer:
        spared, self._spared = self._spared, NOWHERE
        return min(self.buffers, key=lambda buffer: (buffer.held.point == spared != NOWHERE, buffer.held.point))

    def settle(self) -> None:
        """Wait for a copy that is under way: what it is of is about to change."""
        for buffer in self.buffers:
            buffer.settle()

    def held(self) -> Iterator[Copy]:
        self.settle()
        yield from (buffer.held for buffer in self.buffers if buffer.held != NO_COPY)

    def drop_after(self, point: Point, spared: Point = NOWHERE) -> None:
        """What is newer, by its step or its history, is of a future that did not come to be.

        ``spared``: the newest of which all ranks have theirs. It is not the next to be overwritten: should that be
        interrupted as well, no step would be left.
        """
        self._spared = spared
        for buffer in self.buffers:
            if not buffer.held.point.is_before(point):
                buffer.held = NO_COPY

    def find(self, copy: Copy) -> Buffer | None:
        return next((buffer for buffer in self.buffers if buffer.held == copy), None)

    def take(self, record: Record, copy: Copy) -> Buffer:
        """Copy a state that is in place. It must not change before `settle`."""
        self.settle()
        buffer = self.next()
        target = buffer.lay_out(record.tree, record.header())
        streams = {
            device: self._stream(device) for device in {tensor.device for tensor in record.tensors if tensor.is_cuda}
        }
        with torch.no_grad():
            for room, tensor in zip(target.tensors, record.tensors, strict=True):
                if (stream := streams.get(tensor.device)) is None:
                    room.copy_(tensor)
                    continue
                with torch.cuda.stream(stream):
                    room.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)  # should it be freed before
        buffer.holds_after([stream.record_event() for stream in streams.values()], copy)
        if not streams:
            buffer.settle()
        return buffer

    def _stream(self, device: torch.device) -> Any:
        """One beside the training, that waits for what was begun so far."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


class Replicator:
    """Sends each new copy to another rank and keeps that of a third one, beside the training.

    Args:
        kept: where the other one's copies go.
        group: that of its own, on the host: the training's collectives do not wait for it.
        distance: rank r sends to rank r + distance, around.
    """

    def __init__(self, kept: Copies, group: ProcessGroup, distance: int) -> None:
        #: weakly: who has destroyed the process groups has no threads of theirs left
        self._kept, self._group = kept, weakref.ref(group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._to, self._from = (rank + distance) % size, (rank - distance) % size
        self.sender = Beside("inprocess-replicas")

    def begin(self, buffer: Buffer) -> None:
        """Send this one. It must not change before the sender has ended."""
        self.sender.begin(buffer.held.step, self._exchange, buffer)

    def _exchange(self, buffer: Buffer) -> None:
        try:
            buffer.settle()  # only then it is known which one it is
            wire = Wire(there(self._group))
            sent = wire.post_numbers(buffer.held.row(), self._to)
            sent += wire.post(buffer.record, buffer.header, self._to)
            copy = Copy.of(wire.receive_numbers(4, self._from))
            header = wire.receive_header(self._from)
            room = self._kept.next()
            wire.receive(room.lay_out(read(header), header), self._from, f"a copy of rank {self._from}")
            room.held = copy
            for post in sent:
                post.wait()
        except Exception as error:  # the iteration is over, as a rule: the copy before is there yet
            log.info("the copy of step %d is not kept elsewhere: %s", buffer.held.step, error)


def there(group: weakref.ref[ProcessGroup]) -> ProcessGroup:
    found = group()
    if found is None:
        raise LiveStateError("its process group is destroyed; call wait() before")
    return found
