"""A file system that stops to answer when a test says so, and answers again: ``stuck:///path``."""

from __future__ import annotations

import threading
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Stuck(LocalFileSystem):
    """The local one. What is asked while it hangs gets its answer when it is back."""

    protocol = "stuck"
    #: set: it answers
    answers = threading.Event()
    #: set as soon as somebody waits for it
    asked = threading.Event()
    answers.set()

    @classmethod
    def hang(cls) -> None:
        cls.asked.clear()
        cls.answers.clear()

    @classmethod
    def come_back(cls) -> None:
        cls.answers.set()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix("stuck://"))

    def _wait(self) -> None:
        if not self.answers.is_set():
            self.asked.set()
            self.answers.wait()

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return super().open(*args, **kwargs)

    def isdir(self, path: Any) -> bool:
        self._wait()
        found: bool = super().isdir(path)
        return found


def install() -> None:
    fsspec.register_implementation("stuck", Stuck, clobber=True)
