"""Health checks: absent hardware is no fault, present faults are; with a fake driver and a fake device tree."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from inprocess import health_check
from inprocess.exception import HealthCheckError, OptionError
from inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
)
from inprocess.state import FrozenState

STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)


def failed(iteration: int, error: Exception) -> FrozenState:
    return dataclasses.replace(STATE, iteration=iteration, fn_exception=error)


def test_fault_counter_counts_own_faults_once_each() -> None:
    check, errors = FaultCounter(2), [ValueError(str(i)) for i in range(3)]
    for i in range(2):
        check(failed(i, errors[i]))
        check(failed(i, errors[i]))  # again, before the next iteration
        check(STATE)
    assert check.faults == 2
    with pytest.raises(FaultCounterExceeded, match="failed 3 times, more than max_rank_faults=2"):
        check(failed(2, errors[2]))
    assert issubclass(FaultCounterExceeded, HealthCheckError)


def test_fault_counter_without_a_limit() -> None:
    check = FaultCounter()
    for i in range(9):
        check(failed(i, ValueError()))
    assert check.faults == 9


def test_arguments_are_checked() -> None:
    with pytest.raises(OptionError, match="max_rank_faults=0"):
        FaultCounter(0)
    with pytest.raises(OptionError, match="timeout=-1"):
        CudaHealthCheck(-1)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(health_check, "_told", set())


def test_absent_hardware_is_not_checked_and_told_once(
    no_driver: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "inprocess")
    checks = [
        CudaHealthCheck(),
        ChainedGPUHealthCheck(),
        ChainedNVLHealthCheck(),
        ChainedNicHealthCheck(sysfs=tmp_path),
    ]
    for check in checks * 2:
        assert check(STATE) is STATE
    told = [record.getMessage().split(" is not checked")[0] for record in caplog.records]
    assert told == ["CUDA", "the GPU", "NVLink", "InfiniBand"]


def fake_cuda(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0, used: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


@pytest.mark.parametrize(
    ("local_rank", "count", "current", "used", "device"),
    [
        ("3", 8, 0, True, 3),
        ("3", 8, 0, False, 3),
        ("3", 1, 0, True, 0),  # CUDA_VISIBLE_DEVICES shows each process only its own
        ("3", 2, 0, True, 0),
        ("3", 8, 5, True, 5),  # the program chose
        (None, 8, 2, True, 2),
        (None, 8, 0, False, 0),
        ("x", 8, 0, True, 0),
    ],
)
def test_the_right_device(
    monkeypatch, local_rank: str | None, count: int, current: int, used: bool, device: int
) -> None:
    fake_cuda(monkeypatch, count, current, used)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    monkeypatch.setattr(
        torch, "ones", lambda size, device: seen.append(device) or SimpleNamespace(sum=lambda: torch.tensor(8))
    )
    assert CudaHealthCheck(5)(STATE) is STATE
    assert seen == [device, f"cuda:{device}"]


def test_a_cuda_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 1)

    def broken(device: int) -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(HealthCheckError, match="CUDA device 0 fails: device-side assert"):
        CudaHealthCheck(5)(STATE)


def test_a_hanging_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 1)

    def too_late(name: str, timeout: float, fn: object) -> None:
        raise health_check.TimeoutError(f"{name} did not end within timeout={timeout:g}s")

    monkeypatch.setattr(health_check, "run_in_thread", too_late)
    with pytest.raises(HealthCheckError, match=r"does not answer: .* timeout=5s"):
        CudaHealthCheck(5)(STATE)


class Driver:
    """A fake libnvidia-ml: one GPU."""

    def __init__(self) -> None:
        self.action, self.links, self.field_result, self.lost, self.asked, self.open = 0, {0, 1}, 0, False, [], 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
        self.asked.append(index.value)
        return 15 if self.lost else 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        self.asked.append(uuid.decode())
        return 15 if self.lost else 0

    def nvmlDeviceGetFieldValues(self, handle, count, field) -> int:
        field._obj.result, field._obj.value = self.field_result, self.action
        return 0

    def nvmlDeviceGetNvLinkState(self, handle, link, active) -> int:
        active._obj.value = link in self.links
        return 0 if link < 4 else 2

    def nvmlDeviceGetPciInfo_v3(self, handle, info) -> int:
        info._obj.bus = 0x4B
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(health_check, "_told", set())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield driver
    assert driver.open == 0


def test_gpu_that_needs_a_reset(driver: Driver) -> None:
    check = ChainedGPUHealthCheck()
    assert check(STATE) is STATE
    driver.action = 1
    with pytest.raises(HealthCheckError, match="needs a GPU reset"):
        check(STATE)
    driver.field_result = 3  # an older driver does not know the question
    assert check(STATE) is STATE
    driver.lost = True
    with pytest.raises(HealthCheckError, match="GPU is lost"):
        check(STATE)


@pytest.mark.parametrize(
    ("visible", "local_rank", "index", "asked"),
    [
        (None, None, None, 0),
        (None, "2", None, 2),
        ("4,5", "1", None, 5),
        ("4", "3", None, 4),
        ("GPU-a,GPU-b", "1", None, "GPU-b"),
        ("4,5", "1", 0, 4),
    ],
)
def test_the_right_physical_device(driver: Driver, monkeypatch, visible, local_rank, index, asked) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    ChainedGPUHealthCheck(index)(STATE)
    assert driver.asked == [asked]


def test_cuda_in_use_names_the_device_itself(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 2, current=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    ChainedGPUHealthCheck()(STATE)
    assert driver.asked == ["GPU-uuid-1"]


def test_nvlink_that_went_down(driver: Driver) -> None:
    check = ChainedNVLHealthCheck()
    assert check(STATE) is STATE
    driver.links = {0, 1, 2}
    assert check(STATE) is STATE
    driver.links = {1}
    with pytest.raises(HealthCheckError, match=r"\[0, 2\]"):
        check(STATE)


def adapter(sysfs: Path, name: str, pci: str) -> Path:
    """An InfiniBand adapter at a place in the PCI tree; returns its only port."""
    device = sysfs / "devices" / pci
    port = device / "infiniband" / name / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (sysfs / "class" / "infiniband").mkdir(parents=True, exist_ok=True)
    (sysfs / "class" / "infiniband" / name).symlink_to(device / "infiniband" / name)
    (device / "infiniband" / name / "device").symlink_to(device)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters" / "link_downed").write_text("0\n")
    return port


@pytest.fixture
def near_and_far(tmp_path: Path) -> tuple[Path, Path]:
    gpu = tmp_path / "devices" / "pci0000:40" / "0000:4a:00.0" / "0000:4b:00.0"
    gpu.mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices" / "0000:4b:00.0").symlink_to(gpu)
    near = adapter(tmp_path, "mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    return near, adapter(tmp_path, "mlx5_1", "pci0000:80/0000:81:00.0")


def test_nic_near_the_gpu_only(driver: Driver, near_and_far: tuple[Path, Path], tmp_path: Path) -> None:
    near, far = near_and_far
    check = ChainedNicHealthCheck(sysfs=tmp_path)
    assert check(STATE) is STATE
    (far / "counters" / "link_downed").write_text("5\n")
    assert check(STATE) is STATE
    (near / "counters" / "link_downed").write_text("1\n")
    with pytest.raises(HealthCheckError, match=r"mlx5_0 port 1"):
        check(STATE)
    assert check(STATE) is STATE  # it came back: reported once


def test_nic_by_name_that_is_not_active_any_more(no_driver: None, near_and_far, tmp_path: Path) -> None:
    check = ChainedNicHealthCheck(nics=["mlx5_1"], sysfs=tmp_path)
    assert check(STATE) is STATE
    (near_and_far[1] / "state").unlink()
    with pytest.raises(HealthCheckError, match=r"mlx5_1 port 1 \(gone\)"):
        check(STATE)


def test_nics_without_a_gpu_are_not_checked(no_driver: None, near_and_far, tmp_path: Path) -> None:
    check = ChainedNicHealthCheck(sysfs=tmp_path)
    check(STATE)
    near_and_far[0].joinpath("state").write_text("1: DOWN")
    assert check(STATE) is STATE
