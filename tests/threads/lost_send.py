"""Two ranks of Gloo, made so that one's send is lost: a write fails in its event thread.

Rank 0 waits in a send for its peer, and is stopped. Rank 1 announces that it is ready to receive, and dies in a way
that resets the connection. When rank 0 goes on, its event thread reads the announcement, writes, and gets the error.
"""

from __future__ import annotations

import array
import datetime
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import termios
import threading
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist

from inprocess.collectives import gloo, gloo_lost
from inprocess.system import procfs
from inprocess.testing import server
from tests.ranks.targets import wait_until

#: of Gloo's operations, and of everything the parent waits for (seconds)
TIMEOUT_S = 60
SIZE = 1 << 20


def connections() -> list[socket.socket]:
    """Copies of Gloo's connections in this process, for the caller to close."""
    copies = [procfs.copy_of(descriptor, inode) for descriptor, inode in gloo._gloo_descriptors()]
    return [copy for copy in copies if copy is not None and not _listens(copy)]


def _listens(copy: socket.socket) -> bool:
    if listens := bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        copy.close()
    return listens


def are_gone() -> bool:
    gloo.shutdown_gloo_connections()
    left = connections()
    for copy in left:
        copy.close()
    return not left


def _group(rank: int, port: int) -> dist.ProcessGroupGloo:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=TIMEOUT_S))


def sender(port: int, parent: Connection) -> None:
    """Reports the process's waits in Gloo once it sends, then once no connection is left, then how the send ended."""
    group = _group(0, port)
    ended: list[str] = []

    def send() -> None:
        try:
            group.send([torch.ones(SIZE)], 1, 0).wait()
        except RuntimeError as error:
            ended.append(str(error))
        else:
            ended.append("sent")

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: bool(gloo_lost._waits(None)), TIMEOUT_S)
    parent.send("sends")
    parent.recv()  # stopped and continued meanwhile
    wait_until(are_gone, TIMEOUT_S)
    thread.join(2 * gloo_lost.LOST_AFTER_S)
    parent.send((thread.is_alive(), len(gloo_lost._waits(None))))
    wait_until(lambda: bool(gloo_lost.lost_operations.release()) or not thread.is_alive(), TIMEOUT_S)
    thread.join()
    parent.send(ended)


def receiver(port: int, parent: Connection) -> None:
    group = _group(1, port)
    parent.recv()
    work = group.recv([torch.zeros(SIZE)], 0, 0)
    (connection,) = connections()
    wait_until(lambda: unacknowledged(connection) == 0, TIMEOUT_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    parent.send("ready")
    parent.recv()  # never: it is killed
    del work


def unacknowledged(connection: socket.socket) -> int:
    """Bytes that the other end's kernel does not have yet."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]


class Pair:
    """Both ranks, from the parent's side; none is left behind."""

    def __init__(self) -> None:
        server.start_server()
        context = multiprocessing.get_context("forkserver")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self._pipes = [], []
        for target in (sender, receiver):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        del self._store

    def heard(self, rank: int) -> Any:
        assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} says nothing"
        return self._pipes[rank].recv()

    def go_on(self, rank: int) -> None:
        self._pipes[rank].send(None)

    def stop_sender(self) -> None:
        pid = self.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    def continue_sender(self) -> None:
        pid = self.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
        self.go_on(0)
