"""Which GPU is this rank's, for CUDA and for the driver's library NVML. Nothing here judges whether it is well.

NVML is asked through ``pynvml`` of the package ``nvidia-ml-py``, which is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from inprocess.call.part import CallContext, IterationContext, Part
from inprocess.system.logs import get_logger, once

__all__ = [
    "Binding",
    "Device",
    "Gpu",
    "GpuLost",
    "Unavailable",
    "cuda_device",
    "cuda_in_use",
    "find",
    "known_address",
    "nvml",
    "which",
]


class Unavailable(Exception):
    """NVML cannot say this: library, driver, hardware or permission is missing, or it does not know the question."""


class GpuLost(Exception):
    """The driver has lost this rank's GPU, or refuses to use it before a reset."""


@dataclass(frozen=True)
class Device:
    """What is known of a GPU without NVML: its PCI address or its UUID, or else its place among the visible ones."""

    address: str = ""  # as the kernel writes it: 0000:4b:00.0
    uuid: str = ""  # without a prefix, as CUDA gives it
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    index: int = 0  # among the visible ones

    def __str__(self) -> str:
        if address := known_address(self):
            return f"GPU {address}"
        if self.uuid:
            return f"the GPU of UUID {self.uuid}"
        return f"GPU number {self.index}" + (f" of CUDA_VISIBLE_DEVICES={self.visible}" if self.visible else "")


@dataclass(frozen=True)
class Gpu:
    """A GPU that NVML has found; of a MIG instance the GPU that it is a part of."""

    nvml: Any
    handle: Any
    address: str  # as the kernel writes it


log = get_logger("inprocess")
_found: dict[Device, str] = {}  # PCI addresses of what NVML knew before


# --- CUDA


def cuda_in_use() -> bool:
    """Whether this process has begun to use CUDA. Asking does not begin it."""
    import torch  # noqa: PLC0415

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def may_take_another() -> bool:
    """Whether this process uses CUDA and sees more than one GPU. Asking does not begin it."""
    import torch  # noqa: PLC0415

    return cuda_in_use() and torch.cuda.device_count() > 1


class Binding:
    """Warns where a rank that changes may change the GPU. It is not moved back: a program may read RANK again and mean
    the other GPU, or pass ``device_id``."""

    def __init__(self) -> None:
        #: this process's active rank in the first iteration of the call in which it had one
        self._first_rank: int | None = None

    def begin(self, _: CallContext) -> None:
        self._first_rank = None

    def look(self, context: IterationContext) -> None:
        """Each iteration."""
        rank = context.state.active_rank
        if self._first_rank is None:
            self._first_rank = rank
        changes = rank is not None and rank != self._first_rank
        if changes and not os.environ.get("LOCAL_RANK", "") and may_take_another():
            once(
                log.warning,
                "this process was rank %d and is rank %d now, and LOCAL_RANK is not set: torch takes the GPU of a NCCL "
                "group from the rank then, and may take another GPU than before. Set LOCAL_RANK where the ranks are "
                "started, as launchers do, or pass device_id= to init_process_group()",
                *(self._first_rank, rank),
            )


def cuda_device() -> int:
    """Index, among the visible devices, of the GPU that this rank uses. Call it in the thread that uses the GPU.

    Device 0 is current also in a program that never chose one and names ``cuda:LOCAL_RANK`` everywhere, so there
    LOCAL_RANK wins.
    """
    import torch  # noqa: PLC0415

    current, local = torch.cuda.current_device(), _local_rank()
    return local if current == 0 and local is not None and local < torch.cuda.device_count() else current


def _local_rank() -> int | None:
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() else None


def which(index: int | None = None) -> Device:
    """This rank's GPU, or the visible one of that index. Call it in the thread that uses the GPU."""
    if cuda_in_use():  # then CUDA itself says which one it is, whatever the order of devices
        return _as_cuda_knows_it(cuda_device() if index is None else index)
    visible, local = os.environ.get("CUDA_VISIBLE_DEVICES"), _local_rank() or 0
    if visible is not None and len(visible.split(",")) == 1:
        local = 0  # each process sees only its own
    return Device(visible=visible, index=local if index is None else index)


def _as_cuda_knows_it(index: int) -> Device:
    import torch  # noqa: PLC0415

    known = torch.cuda.get_device_properties(index)
    place = [getattr(known, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]  # torch 2.6 has none
    address = "" if -1 in place else "{:04x}:{:02x}:{:02x}.0".format(*place)
    return Device(address=address, uuid=str(getattr(known, "uuid", "")), index=index)


# --- NVML


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The module pynvml, between its nvmlInit and nvmlShutdown; its errors become ours.

    Raises:
        Unavailable: the module, the driver or an answer is missing.
        GpuLost: a question found the GPU lost, or in need of a reset.
    """
    try:
        import pynvml  # noqa: PLC0415
    except ImportError as error:
        raise Unavailable(f"{error}: pip install inprocess[nvml]") from error
    try:
        pynvml.nvmlInit()  # loads the library once; afterwards it counts
        try:
            yield pynvml
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise (GpuLost if is_lost(pynvml, error) else Unavailable)(f"NVML says: {error}") from error


def is_lost(pynvml: Any, error: Any) -> bool:
    """Whether an error of NVML says that the GPU is gone. Not, for example, a question that it does not support."""
    return error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)


def known_address(device: Device) -> str | None:
    """The PCI address as far as it is known without asking NVML (again)."""
    return device.address or _found.get(device)


def find(pynvml: Any, device: Device) -> Gpu:
    """The GPU that `device` describes.

    Once its PCI address is known it is looked up by that: only then is an error certain to be about this GPU, while a
    search by UUID also fails when any other one is lost (says nvml.h).

    Raises:
        Unavailable: it cannot be told which one it is.
        GpuLost: the driver does not know it any more.
        NVMLError: what NVML raises.
    """
    address = known_address(device)
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address) if address else _look_up(pynvml, device)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_Unknown) as error:
        if device in _found:  # it gave the handle before
            raise GpuLost(f"the driver does not give its handle any more: {error}") from error
        raise
    address = _found[device] = address or _address(pynvml, handle)
    return Gpu(pynvml, handle, address)


def _look_up(pynvml: Any, device: Device) -> Any:
    if device.uuid:  # of a MIG instance CUDA gives the instance's own, says cuda.h
        try:
            return _by_mig_uuid(pynvml, f"MIG-{device.uuid}")
        except Unavailable:
            return _by_uuid(pynvml, f"GPU-{device.uuid}")
    if device.visible is None:
        return _by_index(pynvml, device.index)
    entries = visible_entries(device.visible)
    if device.index >= len(entries):
        raise Unavailable(f"CUDA_VISIBLE_DEVICES={device.visible} has no device {device.index}")
    for entry in entries[: device.index]:
        _check_entry(pynvml, device.visible, entry)
    return _by_entry(pynvml, entries[device.index])


def visible_entries(visible: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES that count: those before the first that is none; if one is repeated, none."""
    entries: list[str] = []
    for entry in visible.split(","):
        number = re.match(r"\+?(\d+)", entry.strip())  # CUDA reads digits and ignores what follows
        name = str(int(number.group(1))) if number else entry.strip()
        if not number and not re.match(r"(GPU|MIG)-.", name):
            break
        entries.append(name)
    return entries if len(set(entries)) == len(entries) else []


def _check_entry(pynvml: Any, visible: str, entry: str) -> None:
    """CUDA ends its list at an entry that names no GPU. One that is lost was there when CUDA made the list."""
    try:
        _by_entry(pynvml, entry)
    except pynvml.NVMLError as error:
        if not is_lost(pynvml, error):
            raise Unavailable(f"CUDA_VISIBLE_DEVICES={visible} may end for CUDA at {entry}: {error}") from error


def _by_entry(pynvml: Any, entry: str) -> Any:
    if entry.isdecimal():
        return _by_index(pynvml, int(entry))
    if entry.startswith("MIG-GPU-"):  # MIG-GPU-<UUID>/<GPU instance>/<compute instance>: drivers before 470
        return _by_uuid(pynvml, entry.removeprefix("MIG-").split("/")[0])
    return _by_mig_uuid(pynvml, entry) if entry.startswith("MIG-") else _by_uuid(pynvml, entry)


def _by_mig_uuid(pynvml: Any, uuid: str) -> Any:
    try:
        instance = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:  # also of another GPU that is lost
        raise Unavailable(f"NVML finds no {uuid}: {error}") from error
    return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)


def _by_uuid(pynvml: Any, uuid: str) -> Any:
    """`uuid` may be a beginning that no other GPU shares, as in CUDA_VISIBLE_DEVICES."""
    found, lost = [], None
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(uuid):
                found.append(handle)
        except pynvml.NVMLError as error:
            lost = error if is_lost(pynvml, error) else lost
    if len(found) == 1:
        return found[0]
    if lost is not None and not found:
        raise lost  # it is the one that cannot say its name
    raise Unavailable(f"{len(found)} GPUs that NVML lists are called {uuid}")


def _by_index(pynvml: Any, index: int) -> Any:
    """NVML counts GPUs by PCI address, CUDA begins with the fastest unless told otherwise: the same for equal GPUs."""
    count = pynvml.nvmlDeviceGetCount()
    if index >= count:
        raise Unavailable(f"NVML lists {count} GPUs, not number {index}")
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(_models(pynvml, count)) > 1:
        raise Unavailable("GPUs of several models, in an order that only CUDA knows: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _models(pynvml: Any, count: int) -> set[str]:
    names = set()
    for index in range(count):
        with contextlib.suppress(pynvml.NVMLError):  # another rank's, and lost
            names.add(_text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))))
    return names


def _address(pynvml: Any, handle: Any) -> str:
    """NVML writes 00000000:4B:00.0, the kernel 0000:4b:00.0."""
    domain, bus, device, function = re.split("[:.]", _text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # by version of pynvml


_binding = Binding()
part = Part(call_begins=_binding.begin, iteration_begins=_binding.look)
