"""A machine with GPUs, as pynvml shows it: its real constants, structures and errors, without a driver."""

from __future__ import annotations

import dataclasses
from typing import Any

import pynvml


@dataclasses.dataclass
class FakeGpu:
    """What a test may change; `errors` has the code with which a function fails on this GPU."""

    uuid: str
    bus_id: str | bytes
    name: str | bytes = "model A"
    instances: tuple[str, ...] = ()  # UUIDs of its MIG instances
    action: int = 0
    action_error: int = 0
    uncorrected: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    pages: int = 0
    links: dict[int, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)

    def lose(self, error: int = pynvml.NVML_ERROR_GPU_IS_LOST) -> None:
        self.errors["all"] = error


@dataclasses.dataclass
class Instance:
    """Handle of a MIG instance, of which NVML answers nothing that is asked here."""

    gpu: FakeGpu


class FakeNvml:
    """Stands in for the module; `asked` names the functions that were called."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.open = 0
        self.asked: list[str] = []
        self.init_error = 0

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("nvmlD"), f"{name} is not faked"
        return getattr(pynvml, name)

    def _on(self, function: str, gpu: Any) -> FakeGpu:
        self.asked.append(function)
        assert self.open > 0
        if not isinstance(gpu, FakeGpu):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        error = gpu.errors.get("all") or gpu.errors.get(function)
        if error:
            raise pynvml.NVMLError(error)
        return gpu

    def nvmlInit(self) -> None:
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        assert self.open > 0
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._on("by index", self.gpus[index])

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> FakeGpu:
        for gpu in self.gpus:
            if short(gpu.bus_id) == address:
                return self._on("by address", gpu)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | Instance:
        for gpu in self.gpus:
            self._on("by UUID", gpu)  # it fails when any GPU is lost
            if uuid in gpu.instances:
                return Instance(gpu)
            if uuid == gpu.uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: object) -> FakeGpu:
        assert isinstance(handle, Instance)
        return handle.gpu

    def nvmlDeviceGetUUID(self, handle: object) -> str:
        return self._on("UUID", handle).uuid

    def nvmlDeviceGetName(self, handle: object) -> str | bytes:
        return self._on("name", handle).name

    def nvmlDeviceGetPciInfo(self, handle: object) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.busId = self._on("PCI", handle).bus_id
        return info

    def nvmlDeviceGetFieldValues(self, handle: object, fields: list[int]) -> Any:
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        gpu, values = self._on("fields", handle), (pynvml.c_nvmlFieldValue_t * 1)()
        values[0].nvmlReturn, values[0].value.uiVal = gpu.action_error, gpu.action
        return values

    def nvmlDeviceGetTotalEccErrors(self, handle: object, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self._on("ECC", handle).uncorrected

    def nvmlDeviceGetRemappedRows(self, handle: object) -> tuple[int, int, int, int]:
        return self._on("rows", handle).rows

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: object) -> int:
        return self._on("pages", handle).pages

    def nvmlDeviceGetNvLinkState(self, handle: object, link: int) -> int:
        gpu = self._on(f"link {link}", handle)
        if link not in gpu.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpu.links[link]


def short(bus_id: str | bytes) -> str:
    """As the kernel writes it."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    return f"{int(text[:8], 16):04x}{text[8:].lower()}"
