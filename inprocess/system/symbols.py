"""C++ functions and objects of the libraries that torch loaded, by their symbols."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

#: room for a ``std::runtime_error``, 16 bytes in libstdc++
_ERROR_SIZE = 64


class Missing(Exception):
    """The libraries do not have what was asked for, or have it under another name."""


@functools.cache
def _libraries() -> ctypes.CDLL:
    """torch's extension module with all that it depends on; nothing is loaded anew."""
    file = getattr(torch._C, "__file__", None)
    if file is None:
        raise Missing("torch._C has no file")
    try:
        return ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
    except OSError as error:
        raise Missing(str(error)) from error


def function(name: str, *arguments: Any, result: Any = None) -> Any:
    """A function to call, with the types of its arguments and of its result. Raises Missing."""
    return ctypes.CFUNCTYPE(result, *arguments)(address(name))


def address(name: str) -> int:
    """Where a function or an object is. Raises Missing."""
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(_libraries(), name))
    except ValueError as error:
        raise Missing(str(error)) from error


class ExceptionPointer:
    """A ``std::exception_ptr`` to a new ``std::runtime_error``, for a function that takes one by value.

    Built as ``std::make_exception_ptr`` does it, from the functions of the C++ run time library (libstdc++ from GCC 7
    on; the Itanium C++ ABI passes the pointer itself by address, and whoever calls destroys it). Raises Missing.
    """

    def __init__(self, message: bytes) -> None:
        pointer = ctypes.c_void_p
        allocate = function("__cxa_allocate_exception", ctypes.c_size_t, result=pointer)
        prepare = function("__cxa_init_primary_exception", pointer, pointer, pointer, result=pointer)
        construct = function("_ZNSt13runtime_errorC1EPKc", pointer, ctypes.c_char_p)
        own = function("_ZNSt15__exception_ptr13exception_ptrC1EPv", pointer, pointer)
        self._release = function("_ZNSt15__exception_ptr13exception_ptrD1Ev", pointer)
        kind, destruct = address("_ZTISt13runtime_error"), address("_ZNSt13runtime_errorD1Ev")
        error = allocate(_ERROR_SIZE)
        prepare(error, kind, destruct)
        construct(error, message)
        self._word = ctypes.c_void_p()
        own(ctypes.addressof(self._word), error)

    def __enter__(self) -> int:
        """Its address."""
        return ctypes.addressof(self._word)

    def __exit__(self, *raised: object) -> None:
        self._release(ctypes.addressof(self._word))
