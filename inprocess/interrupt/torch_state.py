"""What torch keeps per thread (autograd on or off, autocast, dispatch keys, modes), put back after an interruption.

A ``with`` block puts such a thing back when it is left. But an interruption may come inside the ``__enter__`` or
``__exit__`` of a context manager that is written in Python, such as ``torch.no_grad`` and all that are generators: what
it changed then stays changed, in this thread, for ever. Seen with tensor parallelism, whose operations pass dozens of
these: one rank of two went on without autograd's dispatch keys, so that in each later iteration its collectives were
not those of the other.

So the function begins each iteration with what it began the one before with, also as far as it has set such things
itself: it is called again from its beginning. What is set when it returns stays.

What a backward pass that an error has left had still to do stays in its thread, too: nodes that were ready to run, with
activations, gradients, hooks and process groups, until the thread's next pass. `forget_backward` runs an empty one.
"""

from __future__ import annotations

from typing import Any

import torch

from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger, once

__all__ = ["TorchState", "capture", "forget_backward"]

log = get_logger(__name__)

_C: Any = torch._C


def capture() -> TorchState | None:
    """Of this thread, now: the main thread, before it calls the user's code. None where torch keeps it elsewhere."""
    try:
        return TorchState()
    except Exception as error:
        once(
            log.warning,
            "torch %s keeps the state of its threads in a way that is not known here (%s): what an interrupted context "
            "manager has changed in it, such as torch.no_grad(), stays so after a restart",
            torch.__version__,
            in_words(error),
        )
        return None


def forget_backward() -> None:
    """Let go of what a backward pass that an error has left keeps in this thread; 11 us. Never raises."""
    try:
        if _C._autograd._get_sequence_nr() == 0:  # of the next node: none was made, and no engine is to be started
            return
        with torch.enable_grad():
            torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))
    except Exception as error:
        log.debug("what a backward pass has left could not be released: %s", in_words(error))


class TorchState:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        self._dispatch = _Dispatch()
        self._autocast = _autocast()
        self._function_modes = _function_modes()
        self._dispatch_modes = _C._len_torch_dispatch_stack()
        self._hooks = _top_hooks()

    def restore(self) -> None:
        """Put back what is not as it was. Never raises: where torch keeps a thing elsewhere, that stays as it is."""
        for part in (self._put_modes, self._put_hooks, self._put_autocast, self._dispatch.put):
            try:
                part()
            except Exception as error:
                log.debug("torch's state of this thread could not be put back: %s", in_words(error))

    def _put_modes(self) -> None:
        while _C._len_torch_dispatch_stack() > self._dispatch_modes:
            _C._pop_torch_dispatch_stack(None)
        depth, state = self._function_modes
        added = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack() - depth)]
        # that of torch.set_default_device(), which would miss it
        device = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        for mode in reversed(added):
            if mode is device:
                _C._push_on_torch_function_stack(mode)
        _C._set_torch_function_state(state)

    def _put_hooks(self) -> None:
        """Of saved tensors: activation checkpointing."""
        while (top := _top_hooks()) is not None and top != self._hooks:
            _C._autograd._pop_saved_tensors_default_hooks()

    def _put_autocast(self) -> None:
        if _autocast() == self._autocast:
            return
        depth, cached, devices = self._autocast
        for device, (enabled, dtype) in devices.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


class _Dispatch:
    """Which of the dispatcher's keys are in use, and the modes of autograd."""

    def __init__(self) -> None:
        self._include, self._exclude = _keys()
        self._inference = torch.is_inference_mode_enabled()
        self._autograd = _autograd()

    def put(self) -> None:
        same_keys = _keys() == (self._include, self._exclude)
        if same_keys and torch.is_inference_mode_enabled() == self._inference and _autograd() == self._autograd:
            return
        # Nothing sets all keys for good, but what has changed them puts back what it found: the last of these is left
        # last, and finds what is right.
        wrong, keys = _C._InferenceMode(self._inference), _C._ForceDispatchKeyGuard(self._include, self._exclude)
        wrong.__enter__()
        keys.__enter__()
        for name, value in zip(_AUTOGRAD, self._autograd, strict=True):
            getattr(_C, f"_set_{name}_enabled")(value)
        right = _C._InferenceMode(self._inference)
        right.__enter__()
        for each in (keys, wrong, right):
            each.__exit__(None, None, None)


def _keys() -> tuple[Any, Any]:
    return _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def _autograd() -> tuple[bool, ...]:
    return (torch.is_grad_enabled(), *(getattr(_C, f"_is_{name}_enabled")() for name in _AUTOGRAD[1:]))


#: modes of autograd, as in the names of what reads and sets them
_AUTOGRAD = ("grad", "fwd_grad", "multithreading", "view_replay")


def _function_modes() -> tuple[int, Any]:
    """How many there are, and whether they are in use."""
    return _C._len_torch_function_stack(), _C._get_torch_function_state()


def _top_hooks() -> Any:
    return _C._autograd._top_saved_tensors_default_hooks(True)


def _autocast() -> tuple[int, bool, dict[str, tuple[bool, torch.dtype]]]:
    """Depth, whether it caches, and for each kind of device whether it is on, and with what type of numbers."""
    devices = {each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES}
    return _autocast_depth(), torch.is_autocast_cache_enabled(), devices


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


#: what may be trained on
_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mtia")
