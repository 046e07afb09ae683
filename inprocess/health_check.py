"""Checks whether this rank is fit to go on. Absent hardware or an absent library for it is no fault: it is not checked.

A check raises (best a HealthCheckError) to take its rank out of the job, and returns the state otherwise.
"""

from __future__ import annotations

import abc
import ctypes
import datetime
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .exception import HealthCheckError, TimeoutError
from .finalize import run_in_thread
from .options import seconds
from .rank_filter import positive
from .state import FrozenState

__all__ = [
    "ChainedGPUHealthCheck",
    "ChainedNVLHealthCheck",
    "ChainedNicHealthCheck",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "HealthCheck",
]

_log = logging.getLogger(__name__)


class HealthCheck(abc.ABC):
    """Base class of ``health_check`` hooks; a plain callable does as well. A rank whose check raises leaves the job."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Check, raise if this rank cannot go on, and return the state (None: unchanged)."""


class FaultCounterExceeded(HealthCheckError):
    """This rank's function failed more often than FaultCounter allows."""


class FaultCounter(HealthCheck):
    """Counts the iterations in which this rank's own function raised, and takes the rank out beyond the limit.

    Args:
        max_rank_faults: faults that are tolerated; None: any number.

    Raises:
        OptionError: the limit is not an integer >= 1.
        FaultCounterExceeded: at the call that sees one fault more than `max_rank_faults`.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = None if max_rank_faults is None else positive("max_rank_faults", max_rank_faults)
        self.faults = 0
        self._counted: tuple[int, int] | None = None

    def __call__(self, state: FrozenState) -> FrozenState:
        fault = (state.iteration, id(state.fn_exception))  # not the exception itself: it keeps frames alive
        if state.fn_exception is None or fault == self._counted:  # checks run twice around a restart
            return state
        self._counted = fault
        self.faults += 1
        if self.max_rank_faults is not None and self.faults > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"initial rank {state.initial_rank} failed {self.faults} times, more than "
                f"max_rank_faults={self.max_rank_faults}"
            )
        return state


class CudaHealthCheck(HealthCheck):
    """Runs a small computation on this rank's GPU and waits for it; without CUDA nothing is checked.

    The GPU is the current device, if the program chose one; else the one that ``LOCAL_RANK`` names among the visible
    ones; else device 0, as when every process sees only its own.

    Args:
        timeout: a timedelta, or seconds; a GPU that does not answer within it is unfit.

    Raises:
        OptionError: `timeout` is no duration.
        HealthCheckError: at the call, when the GPU fails or does not answer.
    """

    def __init__(self, timeout: datetime.timedelta | float = 30.0) -> None:
        self.timeout = seconds("timeout", timeout)

    def __call__(self, state: FrozenState) -> FrozenState:
        import torch  # noqa: PLC0415 - only who checks CUDA pays for it

        in_bad_fork = getattr(torch.cuda, "_is_in_bad_fork", lambda: False)  # without it CUDA itself says so
        if not torch.cuda.is_available() or in_bad_fork():
            _not_checked("CUDA", "it is not available in this process")
            return state
        device = local_device()

        def compute() -> None:
            torch.cuda.synchronize(device)
            if torch.ones(8, device=f"cuda:{device}").sum().item() != 8:
                raise HealthCheckError(f"CUDA device {device} computes wrong results")

        try:
            run_in_thread("CudaHealthCheck", self.timeout, compute)
        except TimeoutError as error:
            raise HealthCheckError(f"CUDA device {device} does not answer: {error}") from error
        except RuntimeError as error:
            raise HealthCheckError(f"CUDA device {device} fails: {error}") from error
        return state


class ChainedGPUHealthCheck(HealthCheck):
    """Asks the driver (NVML) whether this rank's GPU is lost or waits for a reset; without NVML nothing is checked.

    Args:
        device_index: index among the visible devices; None: this rank's.

    Raises:
        HealthCheckError: at the call, when the GPU must be reset, drained or replaced.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index

    def __call__(self, state: FrozenState) -> FrozenState:
        _with_nvml("the GPU", self.device_index, _check_recovery)
        return state


class ChainedNVLHealthCheck(HealthCheck):
    """Asks the driver (NVML) whether NVLinks of this rank's GPU that were up are down now; without NVML not checked.

    Args:
        device_index: index among the visible devices; None: this rank's.

    Raises:
        HealthCheckError: at the call, when a link went down since the first call.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index
        self._links_up: set[int] = set()

    def __call__(self, state: FrozenState) -> FrozenState:
        _with_nvml("NVLink", self.device_index, self._check)
        return state

    def _check(self, nvml: _Nvml, gpu: ctypes.c_void_p) -> None:
        links_up = nvml.links_up(gpu)
        lost = self._links_up - links_up
        self._links_up |= links_up
        if lost:
            raise HealthCheckError(f"NVLinks {sorted(lost)} of this rank's GPU went down")


class ChainedNicHealthCheck(HealthCheck):
    """Looks whether the InfiniBand adapters near this rank's GPU lost their link since the first call.

    Reads ``/sys/class/infiniband``; without adapters, or without a GPU to tell which ones are this rank's, nothing is
    checked, unless `nics` names them.

    Args:
        nics: names such as ``mlx5_0``; None: those with the shortest PCI path to this rank's GPU.
        device_index: index of the GPU among the visible devices; None: this rank's.
        sysfs: where the system's device tree is mounted.

    Raises:
        HealthCheckError: at the call, when a link went down.
    """

    def __init__(
        self, nics: Iterable[str] | None = None, device_index: int | None = None, sysfs: str | Path = "/sys"
    ) -> None:
        self.nics = None if nics is None else tuple(nics)
        self.device_index = device_index
        self.sysfs = Path(sysfs)
        self._seen: dict[Path, tuple[str, int]] = {}  # port: (state, times it went down)

    def __call__(self, state: FrozenState) -> FrozenState:
        ports = self._ports()
        if not ports:
            _not_checked("InfiniBand", "this rank has no adapter")
        lost = [self._describe(port) for port in sorted({*ports, *self._seen}) if self._went_down(port)]
        if lost:
            raise HealthCheckError(f"InfiniBand link lost: {', '.join(lost)}")
        return state

    def _ports(self) -> list[Path]:
        base = self.sysfs / "class" / "infiniband"
        nics = self.nics
        if nics is None:
            nics = tuple(nearest_nics(self.sysfs, base, self.device_index)) if base.is_dir() else ()
        return sorted(port for nic in nics for port in (base / nic / "ports").glob("*"))

    def _went_down(self, port: Path) -> bool:
        link, downed = _read(port / "state"), _read(port / "counters" / "link_downed")
        now = (link, int(downed) if downed.isdecimal() else 0)
        before = self._seen.setdefault(port, now)
        self._seen[port] = now
        return now[1] > before[1] or ("ACTIVE" in before[0] and "ACTIVE" not in now[0])

    @staticmethod
    def _describe(port: Path) -> str:
        return f"{port.parent.parent.name} port {port.name} ({_read(port / 'state') or 'gone'})"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nearest_nics(sysfs: Path, base: Path, device_index: int | None = None, gpu: str | None = None) -> list[str]:
    """Names of the adapters that share the longest PCI path with this rank's GPU (`gpu`: its PCI address)."""
    address = pci_address(device_index) if gpu is None else gpu
    if address is None:
        return []
    target = (sysfs / "bus" / "pci" / "devices" / address).resolve().parts
    near: dict[str, int] = {}
    for nic in base.iterdir():
        both = zip(target, (nic / "device").resolve().parts, strict=False)
        near[nic.name] = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    return sorted(name for name, shared in near.items() if shared == max(near.values()))


def local_device() -> int:
    """Index, among the visible devices, of the GPU that this rank uses. Call it in the thread that uses the GPU."""
    import torch  # noqa: PLC0415

    count = torch.cuda.device_count()
    current = torch.cuda.current_device() if _cuda_in_use() else 0
    local = os.environ.get("LOCAL_RANK", "")
    if current == 0 and local.isdecimal() and int(local) < count:
        return int(local)
    return current


def _cuda_in_use() -> bool:
    import torch  # noqa: PLC0415

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _not_checked(what: str, why: str) -> None:
    if what not in _told:
        _told.add(what)
        _log.debug("%s is not checked: %s", what, why)


_told: set[str] = set()  # what was reported as not checked: once in a process is enough


# --- NVML, the driver's own library, without a Python package for it


class _NvmlError(Exception):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.code = code


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field_id", ctypes.c_uint32),
        ("scope_id", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latency", ctypes.c_int64),
        ("value_type", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_uint64),  # a union; small integers are in its low bytes
    )


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


_RECOVERY_FIELD = 230  # "what must be done to make this GPU work again"
_RECOVERY = {1: "a GPU reset", 2: "a reboot of the node", 3: "draining of peer-to-peer traffic", 4: "drain and reset"}
_GPU_IS_LOST = (15, 16)  # fallen off the bus; reset required
_LINKS = 36  # most NVLinks a GPU has


class _Nvml:
    """The few calls that the checks need; every one raises _NvmlError on failure."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def call(self, name: str, *args: Any) -> None:
        function = getattr(self.library, name, None)
        code = 13 if function is None else function(*args)  # 13: the function is not in this driver
        if code != 0:
            raise _NvmlError(name, code)

    def gpu(self, visible: str, uuid: str | None) -> ctypes.c_void_p:
        """The device with `uuid`, or named by an entry of CUDA_VISIBLE_DEVICES."""
        handle = ctypes.c_void_p()
        if uuid is None and visible.isdecimal():
            self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(visible)), ctypes.byref(handle))
        else:
            self.call("nvmlDeviceGetHandleByUUID", (uuid or visible).encode(), ctypes.byref(handle))
        return handle

    def recovery_action(self, gpu: ctypes.c_void_p) -> int:
        """0: the GPU is well."""
        field = _FieldValue(field_id=_RECOVERY_FIELD)
        self.call("nvmlDeviceGetFieldValues", gpu, 1, ctypes.byref(field))
        if field.result != 0:
            raise _NvmlError("nvmlDeviceGetFieldValues", field.result)
        return int(field.value) & 0xFFFFFFFF

    def links_up(self, gpu: ctypes.c_void_p) -> set[int]:
        """Numbers of the NVLinks that are up."""
        up = set()
        for link in range(_LINKS):
            active = ctypes.c_uint()
            try:
                self.call("nvmlDeviceGetNvLinkState", gpu, link, ctypes.byref(active))
            except _NvmlError as error:
                if error.code in _GPU_IS_LOST:
                    raise
                continue  # this GPU has no such link
            if active.value:
                up.add(link)
        return up

    def pci_address(self, gpu: ctypes.c_void_p) -> str:
        """As the system's device tree writes it."""
        info = _PciInfo()
        self.call("nvmlDeviceGetPciInfo_v3", gpu, ctypes.byref(info))
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _check_recovery(nvml: _Nvml, gpu: ctypes.c_void_p) -> None:
    action = nvml.recovery_action(gpu)
    if action != 0:
        raise HealthCheckError(f"this rank's GPU needs {_RECOVERY.get(action, f'recovery action {action}')}")


def _with_nvml(what: str, device_index: int | None, check: Callable[[_Nvml, ctypes.c_void_p], None]) -> None:
    """Run `check` on this rank's GPU; only a lost GPU is a fault, all that merely cannot be asked is not checked."""
    try:
        nvml = _Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
        nvml.call("nvmlInit_v2")
    except (OSError, _NvmlError) as error:
        _not_checked(what, str(error))
        return
    try:
        check(nvml, nvml.gpu(*_physical_device(device_index)))
    except _NvmlError as error:
        if error.code in _GPU_IS_LOST:
            raise HealthCheckError(f"this rank's GPU is lost: {error}") from error
        _not_checked(what, str(error))
    finally:
        nvml.library.nvmlShutdown()


def _physical_device(device_index: int | None) -> tuple[str, str | None]:
    """(entry of CUDA_VISIBLE_DEVICES or physical index, UUID if CUDA is in use) of this rank's GPU."""
    import torch  # noqa: PLC0415

    if _cuda_in_use():  # then CUDA itself says which one it is, whatever the order of devices
        index = local_device() if device_index is None else device_index
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        return str(index), None if uuid is None else f"GPU-{uuid}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    local = os.environ.get("LOCAL_RANK", "")
    index = device_index if device_index is not None else int(local) if local.isdecimal() else 0
    if visible is None:
        return str(index), None
    entries = [entry.strip() for entry in visible.split(",")]
    return entries[index] if index < len(entries) else entries[0], None


def pci_address(device_index: int | None = None) -> str | None:
    """PCI address of this rank's GPU, None if it has none or the driver does not tell."""
    found: list[str] = []
    _with_nvml("the GPU's PCI address", device_index, lambda nvml, gpu: found.append(nvml.pci_address(gpu)))
    return found[0] if found else None
