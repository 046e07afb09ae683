"""Which GPU is this rank's: by what CUDA says, else by CUDA_VISIBLE_DEVICES and LOCAL_RANK, found in a fake NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from inprocess.hardware import gpu
from inprocess.hardware.gpu import Device, GpuLost, Unavailable
from tests.unit.fake_nvml import FakeGpu, FakeNvml

A, B, C = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-bbbb3333-0000"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeNvml(
        FakeGpu(A, "00000000:1B:00.0"),
        FakeGpu(B, "00000000:4B:00.0", instances=("MIG-1234-5678",)),
        FakeGpu(C, "00010000:CB:00.0"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu, "_found", {})
    yield fake
    assert fake.open == 0


def address(index: int | None = None) -> str:
    with gpu.nvml() as module:
        return gpu.find(module, gpu.which(index)).address


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        ("0,2", ["0", "2"]),
        (" 1 , +2", ["1", "2"]),
        ("1gpu,02", ["1", "2"]),  # digits count, as for CUDA
        ("0,-1,1", ["0"]),
        ("1,,2", ["1"]),
        ("0,1,0", []),
        ("", []),
        ("NoDevFiles", []),
        ("GPU-aa,GPU-bb,x,GPU-cc", ["GPU-aa", "GPU-bb"]),
        ("MIG-GPU-aa/1/0", ["MIG-GPU-aa/1/0"]),
    ],
)
def test_entries_of_cuda_visible_devices(visible: str, entries: list[str]) -> None:
    assert gpu.visible_entries(visible) == entries


@pytest.mark.parametrize(
    ("visible", "local_rank", "index", "found"),
    [
        (None, None, None, "0000:1b:00.0"),
        (None, "1", None, "0000:4b:00.0"),
        ("2,1", "1", None, "0000:4b:00.0"),
        ("2", "1", None, "10000:cb:00.0"),  # each process sees its own
        ("2,1", "1", 0, "10000:cb:00.0"),
        (f"{C},{A}", "1", None, "0000:1b:00.0"),
        ("GPU-bbbb2,GPU-aa", "0", None, "0000:4b:00.0"),
        ("MIG-1234-5678", "0", None, "0000:4b:00.0"),
        (f"MIG-{A}/3/0", "0", None, "0000:1b:00.0"),
    ],
)
def test_visible_devices(monkeypatch, nvml: FakeNvml, visible, local_rank, index, found) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert address(index) == found
    nvml.asked.clear()
    assert address(index) == found
    assert nvml.asked == ["by address"]  # what was found once is asked for alone


@pytest.mark.parametrize(
    ("visible", "local_rank", "why"),
    [
        ("0,1", "2", "has no device 2"),
        ("", "0", "has no device 0"),
        ("0,7,1", "2", "NVML lists 3 GPUs, not number 7"),  # the list ends there
        ("GPU-bbbb", "0", "2 GPUs that NVML lists are called GPU-bbbb"),
        ("GPU-zz", "0", "0 GPUs"),
        ("MIG-99", "0", "NVML finds no MIG-99: Not Found"),
        (None, "3", "NVML lists 3 GPUs, not number 3"),
    ],
)
def test_not_to_be_told(monkeypatch, nvml: FakeNvml, visible, local_rank: str, why: str) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(Unavailable, match=why):
        address()


def test_an_entry_before_ours_that_nvml_may_not_ask(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """Whether CUDA can use it, and counts it, is not known."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    nvml.gpus[0].errors["by index"] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(Unavailable, match="CUDA_VISIBLE_DEVICES=0,1 may end for CUDA at 0: Insufficient Permissions"):
        address()


@pytest.mark.parametrize("name", ["model B", b"model B"])
def test_models_that_differ_in_an_order_only_cuda_knows(monkeypatch, nvml: FakeNvml, name: str | bytes) -> None:
    nvml.gpus[2].name = name
    with pytest.raises(Unavailable, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        address()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", A)
    assert address() == "0000:1b:00.0"  # a UUID needs no order
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert address() == "0000:1b:00.0"


def use_cuda(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


def test_cuda_knows_the_address(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """Whatever the variables say."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    use_cuda(monkeypatch, uuid="u", pci_domain_id=0x10000, pci_bus_id=0xCB, pci_device_id=0)
    assert gpu.which() == Device("10000:cb:00.0", "u", None, 1)
    assert address() == "10000:cb:00.0"
    assert nvml.asked == ["by address"]


@pytest.mark.parametrize("uuid", ["bbbb2222-0000", "1234-5678"], ids=["GPU", "MIG instance"])
def test_cuda_knows_the_uuid_alone(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, uuid: str) -> None:
    use_cuda(monkeypatch, uuid=uuid)
    assert gpu.which() == Device(uuid=uuid, index=1)
    assert address() == "0000:4b:00.0"


def test_another_gpu_is_lost(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """By UUID NVML would say that ours is."""
    nvml.gpus[0].lose()
    monkeypatch.setenv("LOCAL_RANK", "1")
    for visible in (f"{A},{B}", "0,1", None):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert address() == "0000:4b:00.0"
    use_cuda(monkeypatch, uuid="bbbb2222-0000")
    assert address() == "0000:4b:00.0"


@pytest.mark.parametrize("visible", [B, "1", "MIG-1234-5678"])
def test_our_gpu_is_lost(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    address()
    nvml.gpus[1].lose(pynvml.NVML_ERROR_RESET_REQUIRED)
    with pytest.raises(GpuLost, match="NVML says: GPU requires restart"):
        address()
    nvml.gpus[1].lose(pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(GpuLost, match="does not give its handle any more: Unknown Error"):
        address()
    del nvml.gpus[1]
    with pytest.raises(GpuLost, match="does not give its handle any more: Not Found"):
        address()


def test_our_gpu_is_lost_at_the_first_look(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    nvml.gpus[1].lose()
    for visible in (B, "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(GpuLost, match="NVML says: GPU is lost"):
            address()


def test_lost_among_others_that_nvml_may_not_ask(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", B)
    nvml.gpus[1].lose()
    nvml.gpus[2].errors["by index"] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(GpuLost, match="GPU is lost"):
        address()


def test_an_unknown_error_at_the_first_look_is_no_loss(nvml: FakeNvml) -> None:
    nvml.gpus[0].lose(pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(Unavailable, match="Unknown Error"):
        address()


def test_a_gpu_that_nvml_never_knew(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """CUDA runs on it, so it is not lost."""
    use_cuda(monkeypatch, uuid="u", pci_domain_id=0, pci_bus_id=0xFF, pci_device_id=0)
    with pytest.raises(Unavailable, match="Not Found"):
        address()


def test_bytes_of_an_older_pynvml(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetPciInfo", lambda handle: SimpleNamespace(busId=b"00000000:4B:00.1"))
    assert address() == "0000:4b:00.1"


def test_what_a_message_calls_it(nvml: FakeNvml) -> None:
    assert str(Device(address="0000:4b:00.0")) == "GPU 0000:4b:00.0"
    assert str(Device(uuid="12-34")) == "the GPU of UUID 12-34"
    assert str(Device(visible="3,4", index=1)) == "GPU number 1 of CUDA_VISIBLE_DEVICES=3,4"
    assert str(Device()) == "GPU number 0"
    address()
    assert str(Device()) == "GPU 0000:1b:00.0"


def test_shutdown_follows_init(nvml: FakeNvml) -> None:
    with pytest.raises(ZeroDivisionError), gpu.nvml():
        assert nvml.open == 1
        raise ZeroDivisionError
    assert nvml.open == 0
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(Unavailable, match="Driver Not Loaded"), gpu.nvml():
        pass


def test_the_real_module_without_a_driver_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", absent)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    with pytest.raises(Unavailable, match="NVML Shared Library Not Found"), gpu.nvml():
        pass
