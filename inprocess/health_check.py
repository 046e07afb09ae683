"""Checks whether this rank is fit to go on. Absent hardware or an absent library for it is no fault: it is not checked.

A check raises (best a HealthCheckError) where its rank is unfit, and returns the state otherwise. Before the function
runs that restarts, so that the check looks once more; after a fault it takes the rank out of the job.
"""

from __future__ import annotations

import abc
import datetime
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from inprocess.hardware import gpu, nic
from inprocess.system.logs import get_logger

from .exception import HealthCheckError, OptionError, TimeoutError
from .finalize import both_forms, run_in_thread
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

T = TypeVar("T")
_log = get_logger(__name__)
_NVML_TIMEOUT = 60.0  # seconds for all questions of one check; a driver that is being asked loads a GPU in a few


class HealthCheck(abc.ABC):
    """Base class of ``health_check`` hooks; a plain callable does as well. A rank whose check keeps raising leaves."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Check, raise if this rank cannot go on, and return the state (None: unchanged)."""


class FaultCounterExceeded(HealthCheckError):
    """This rank's function failed more often than FaultCounter allows."""


class FaultCounter(HealthCheck):
    """Counts the iterations in which this rank's own function, or a hook before it, raised.

    Beyond the limit it takes the rank out.

    Args:
        max_rank_faults: faults that are tolerated; None: any number.

    Raises:
        OptionError: the limit is not an integer >= 1.
        FaultCounterExceeded: at the call that sees one fault more than `max_rank_faults`.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = None if max_rank_faults is None else positive("max_rank_faults", max_rank_faults)
        self.faults = 0

    @both_forms
    def __call__(self, state: FrozenState) -> FrozenState:
        if state.fn_exception is None:
            return state
        self.faults += 1
        if self.max_rank_faults is not None and self.faults > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"initial rank {state.initial_rank} failed {self.faults} times, more than "
                f"max_rank_faults={self.max_rank_faults}"
            )
        return state


class CudaHealthCheck(HealthCheck):
    """Waits for this rank's GPU, runs a small computation on it, compares its result, and waits again.

    The first wait finds work that never ends, and errors of earlier work, which CUDA reports late. The GPU is the
    current device if the program chose one, else the visible one that ``LOCAL_RANK`` names, else device 0.

    A process that has not used CUDA so far is not checked: a look would give it a CUDA context, which takes memory of a
    GPU, may be on the wrong one, is of no use to a job on CPUs, and cannot be used by what the process forks later. Who
    wants the first check to look calls ``torch.cuda.set_device(...)`` before the wrapped function. Nor is the
    computation checked where the GPU has no memory left: that is no fault of the GPU.

    Args:
        timeout: a timedelta, or seconds, for all three steps; a GPU that does not answer within it is unfit.

    Raises:
        OptionError: `timeout` is not a duration.
        HealthCheckError: at the call, when the GPU fails or does not answer. A thread that waits for it is left behind
            then; it does nothing more when the GPU answers late.
    """

    def __init__(self, timeout: datetime.timedelta | float = 30.0) -> None:
        self.timeout = seconds("timeout", timeout)
        self._probe: _Probe | None = None  # the last one

    @both_forms
    def __call__(self, state: FrozenState) -> FrozenState:
        if not gpu.cuda_in_use():
            _not_checked("CUDA", "this process has not used it yet")
            return state
        if self._probe is not None and not self._probe.ended.is_set():
            raise HealthCheckError(f"{self._probe} still does not answer since an earlier check")
        try:
            self._probe = probe = _Probe(gpu.cuda_device(), gpu.which())
        except RuntimeError as error:
            raise HealthCheckError(f"CUDA fails: {error}\n{_CONTEXT_LOST}") from error
        try:
            run_in_thread("CudaHealthCheck", self.timeout, probe.run)
        except TimeoutError as error:
            probe.abandoned = True
            raise HealthCheckError(f"{probe} did not answer within timeout={self.timeout:g}s") from error
        except RuntimeError as error:  # torch.AcceleratorError among them
            if not probe.step:  # no thread could be started: that says nothing of the GPU
                probe.ended.set()
                _not_checked("CUDA", str(error))
                return state
            raise HealthCheckError(f"{probe} fails: {error}\n{_CONTEXT_LOST}") from error
        return state


_CONTEXT_LOST = (
    "The CUDA context of this process is lost: no restart inside this process brings it back, start a new process"
)


class _Probe:
    """One look at a device, in a thread of its own."""

    def __init__(self, index: int, device: gpu.Device) -> None:
        self.index = index
        self.device = device
        self.step = ""
        self.ended = threading.Event()
        self.abandoned = False  # nobody waits for it any more

    def __str__(self) -> str:
        return f"CUDA device {self.index} ({self.device}, {self.step})"

    def run(self) -> None:
        steps = {
            "waiting for earlier work": self._synchronize,
            "in a small computation": self._compute,
            "waiting for the computation": self._synchronize,
        }
        try:
            for self.step, act in steps.items():
                if not self.abandoned:
                    act()
        finally:
            self.ended.set()

    def _synchronize(self) -> None:
        import torch  # noqa: PLC0415

        torch.cuda.synchronize(self.index)  # releases the interpreter lock while it waits

    def _compute(self) -> None:
        import torch  # noqa: PLC0415

        try:
            result = torch.arange(1000, device=f"cuda:{self.index}").square().sum().item()
        except torch.OutOfMemoryError as error:
            _not_checked("what CUDA computes", str(error))
            return
        except RuntimeError as error:
            self._synchronize()  # raises once more if the context is lost
            raise HealthCheckError(f"{self} fails: {error}") from error
        if result != 332_833_500:
            raise HealthCheckError(f"{self} computes wrong results: {result} instead of 332833500")


class ChainedGPUHealthCheck(HealthCheck):
    """Asks the driver (NVML) whether this rank's GPU is lost, waits for a recovery action, or lost memory contents.

    A GPU is unfit if

    * it has fallen off the bus, or the driver refuses it before a reset;
    * the driver asks for a recovery action: a reset, a reboot, draining (older drivers do not know the question);
    * ECC met an error that it could not correct, since the first look: data of this job may have been in that memory.
      What was counted before met another job;
    * remapping of a bad row of its memory has ever failed: that row stays, a reset does not mend it;
    * bad pages of its memory wait for a reboot to be retired: until then they can be used.

    Not a fault: corrected errors, of any number; and bad rows that will be remapped at the next reset, which a warning
    says once, since a "pending remapping won't affect future work on the GPU since error-containment and dynamic page
    blacklisting will take care of that" (nvml.h on nvmlDeviceGetRemappedRows). Where it matters after all, the driver
    asks for a recovery action.

    What cannot be asked is not checked: without ``nvidia-ml-py`` (``pip install inprocess[nvml]``) or a driver nothing
    is, without ECC no ECC. Of a MIG instance the whole GPU is asked.

    Args:
        device_index: index among the visible devices; None: this rank's.

    Raises:
        HealthCheckError: at the call, when the GPU must be reset, drained or replaced, or NVML does not answer for
            60 seconds.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index
        self._uncorrected: dict[str, int] = {}  # PCI address: errors that ECC could not correct, at the first look

    def __call__(self, state: FrozenState) -> FrozenState:
        _ask_driver("the GPU", gpu.which(self.device_index), self._look)
        return state

    def _look(self, found: gpu.Gpu) -> None:
        _check_recovery(found)
        self._check_uncorrected(found)
        _check_rows(found)
        _check_pages(found)

    def _check_uncorrected(self, found: gpu.Gpu) -> None:
        ml = found.nvml
        kind = (ml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, ml.NVML_VOLATILE_ECC)  # volatile: since the driver was loaded
        count = _answer(found, "ECC", lambda: ml.nvmlDeviceGetTotalEccErrors(found.handle, *kind))
        if count is None:
            return
        before = min(count, self._uncorrected.get(found.address, count))
        self._uncorrected[found.address] = before
        if count > before:
            raise HealthCheckError(
                f"GPU {found.address}: {count - before} memory errors since the first look that ECC could not correct"
            )


#: names of NVML_GPU_RECOVERY_ACTION_... -> what the driver asks for
_RECOVERY = {
    "GPU_RESET": "a reset of the GPU",
    "NODE_REBOOT": "a reboot of the node",
    "DRAIN_P2P": "draining of peer-to-peer traffic",
    "DRAIN_AND_RESET": "draining and a reset of the GPU",
    "RECOVER_IMEX_DOMAIN": "a recovery of the IMEX domain",
    "BUS_RESET": "a reset of the GPU's PCIe bus",
    "SYSTEM_REBOOT": "a reboot of the system",
}


def _check_recovery(found: gpu.Gpu) -> None:
    action = _answer(found, "the GPU's recovery action", lambda: _field(found, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"))
    if action:
        known = {
            getattr(found.nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None): words for name, words in _RECOVERY.items()
        }
        raise HealthCheckError(f"GPU {found.address}: the driver asks for {known.get(action, f'action {action}')}")


def _field(found: gpu.Gpu, name: str) -> int:
    (field,) = found.nvml.nvmlDeviceGetFieldValues(found.handle, [getattr(found.nvml, name)])
    if field.nvmlReturn != found.nvml.NVML_SUCCESS:
        raise found.nvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)


def _check_rows(found: gpu.Gpu) -> None:
    rows = _answer(found, "remapping of memory rows", lambda: found.nvml.nvmlDeviceGetRemappedRows(found.handle))
    if rows is None:
        return
    _corrected, _uncorrected, pending, failed = rows
    if failed:
        raise HealthCheckError(
            f"GPU {found.address}: a bad row of its memory could not be remapped; it must be replaced"
        )
    if pending and f"rows of {found.address}" not in _told:
        _told.add(f"rows of {found.address}")
        _log.warning("GPU %s will remap bad rows of its memory at its next reset; it goes on until then", found.address)


def _check_pages(found: gpu.Gpu) -> None:
    ask = found.nvml.nvmlDeviceGetRetiredPagesPendingStatus
    if _answer(found, "retired memory pages", lambda: ask(found.handle)):
        raise HealthCheckError(f"GPU {found.address}: bad pages of its memory stay in use until a reboot")


class ChainedNVLHealthCheck(HealthCheck):
    """Asks the driver (NVML) whether NVLinks of this rank's GPU that were up are down now; without NVML not checked.

    A link that was never up is no fault: not all links of a GPU are wired. Of a MIG instance the whole GPU is asked.

    Args:
        device_index: index among the visible devices; None: this rank's.

    Raises:
        HealthCheckError: at the call, when a link that an earlier call saw up is down, the GPU is lost, or NVML does
            not answer for 60 seconds.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index
        self._up: dict[str, set[int]] = {}  # PCI address: links that were up

    def __call__(self, state: FrozenState) -> FrozenState:
        _ask_driver("NVLink", gpu.which(self.device_index), self._look)
        return state

    def _look(self, found: gpu.Gpu) -> None:
        links = {link: self._state(found, link) for link in range(found.nvml.NVML_NVLINK_MAX_LINKS)}
        up = self._up.setdefault(found.address, set())
        up |= {link for link, active in links.items() if active}
        lost = sorted(link for link in up if links[link] == 0)  # None: not told
        if lost:
            raise HealthCheckError(f"GPU {found.address}: NVLinks {lost} went down")

    @staticmethod
    def _state(found: gpu.Gpu, link: int) -> int | None:
        return _answer(found, "some NVLink", lambda: found.nvml.nvmlDeviceGetNvLinkState(found.handle, link))


class ChainedNicHealthCheck(HealthCheck):
    """Looks whether the RDMA adapters (InfiniBand, RoCE) near this rank's GPU lost their link since the first call.

    Reads ``/sys/class/infiniband``: the state of each port, and how often its link went down, of which RoCE tells
    through the port's network interface. Near are the adapters with the longest PCI path in common with the GPU; if
    none hangs on the same PCI root, those of the same NUMA node, or the only one that there is. Without adapters, or
    without a GPU to tell which ones are this rank's, nothing is checked, unless `nics` names them. A port that was
    never active is no fault.

    Args:
        device_index: index of the GPU among the visible devices; None: this rank's.
        nics: names such as ``mlx5_0``; None: those near this rank's GPU.
        sysfs: where the system's device tree is mounted.

    Raises:
        OptionError: `nics` is one string.
        HealthCheckError: at the call, when a link is down or went down meanwhile, its port is gone, or NVML, asked for
            the GPU's place, finds it lost.
    """

    def __init__(
        self, device_index: int | None = None, nics: Iterable[str] | None = None, sysfs: str | Path = "/sys"
    ) -> None:
        if isinstance(nics, str):
            raise OptionError(f"nics={nics!r} is one string: pass a list of names, nics=[{nics!r}]")
        self.nics = None if nics is None else tuple(nics)
        self.device_index = device_index
        self.sysfs = Path(sysfs)
        self._gpu: str | None = None  # PCI address
        self._seen: dict[Path, nic.Link] = {}

    def __call__(self, state: FrozenState) -> FrozenState:
        ports = {*self._ports(), *self._seen}
        if not ports:
            level = logging.WARNING if self.nics else logging.DEBUG  # a name that is wrong, or a machine without one
            _not_checked("the network adapter", f"none is there, or near this rank's GPU (nics={self.nics})", level)
        lost = [text for port in sorted(ports) if (text := self._look(port))]
        if lost:
            raise HealthCheckError(f"link lost: {', '.join(lost)}")
        return state

    def _ports(self) -> list[Path]:
        if self.nics is not None:
            return nic.ports(self.sysfs, list(self.nics))
        address = self._address()
        if address is None:
            return []
        if address != self._gpu:  # a first look, before the program chose its GPU, was near another one
            self._gpu, self._seen = address, {}
        return nic.ports(self.sysfs, nic.nearest(self.sysfs, address))

    def _address(self) -> str | None:
        device = gpu.which(self.device_index)
        if gpu.known_address(device) is None:
            _ask_driver("the GPU's PCI address", device, lambda found: None)  # finding it is all
        return gpu.known_address(device)

    def _look(self, port: Path) -> str:
        """What is wrong with it."""
        now = nic.read_link(self.sysfs, port)
        before = self._seen.get(port, now)
        if before is None:
            return ""
        if now is not None:
            up = before.state if "ACTIVE" in before.state else now.state  # down stays a fault, also for a second look
            self._seen[port] = nic.Link(up, now.downs)
        if not nic.went_down(before, now):
            return ""
        return f"{port.parent.parent.name} port {port.name} ({'gone' if now is None else now.state or 'state unknown'})"


# --- what can be asked, and what cannot


def _ask_driver(what: str, device: gpu.Device, look: Callable[[gpu.Gpu], None]) -> None:
    """Let `look` ask NVML about a GPU, in a thread: of a GPU that fell off the bus a driver may answer never."""

    def ask() -> None:
        with gpu.nvml() as nvml:
            look(gpu.find(nvml, device))

    try:
        run_in_thread("NVML", _NVML_TIMEOUT, ask)
    except gpu.Unavailable as error:
        _not_checked(what, str(error))
    except gpu.GpuLost as error:
        raise HealthCheckError(f"{device} is lost: {error}") from error
    except TimeoutError as error:
        raise HealthCheckError(f"{device}: the driver did not answer within {_NVML_TIMEOUT:g}s") from error


def _answer(found: gpu.Gpu, what: str, ask: Callable[[], T]) -> T | None:
    """NVML's answer, None where it has none: that alone is not checked. That the GPU is lost is for the caller."""
    try:
        return ask()
    except found.nvml.NVMLError as error:
        if gpu.is_lost(found.nvml, error):
            raise
        _not_checked(what, f"NVML says: {error}")
    except AttributeError as error:  # an older pynvml
        _not_checked(what, str(error))
    return None


def _not_checked(what: str, why: str, level: int = logging.DEBUG) -> None:
    if what not in _told:
        _told.add(what)
        _log.log(level, "%s is not checked: %s", what, why)


_told: set[str] = set()  # what was said: once in a process is enough
