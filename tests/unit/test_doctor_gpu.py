"""What the doctor says of GPUs: a machine as pynvml would show it, with one thing wrong at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from inprocess.doctor import gpu
from inprocess.doctor.findings import Finding, NothingToLookAt, Settings
from tests.unit.fake_nvml import FakeGpu, FakeNvml


class Nvml(FakeNvml):
    """With what only the doctor asks."""

    cuda = 13010
    mig: tuple[int, ...] = ()

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetMigMode(self, handle: object) -> list[int]:
        index = self.gpus.index(self._on("MIG", handle))
        if index >= len(self.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [self.mig[index], 0]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nvml]]:
    """A driver, and GPUs of these models."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()

    def make(*models: str) -> Nvml:
        made = Nvml(*(FakeGpu(f"GPU-{n}", f"0000000{n}:01:00.0", name) for n, name in enumerate(models)))
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    yield make


def settings(tmp_path: Path, nproc: int = 2) -> Settings:
    return Settings(nproc, {}, root=str(tmp_path))


def one(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_nothing_is_wrong(machine: Callable[..., Nvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine("model A", "model A")
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: (13, 0))
    assert [finding for check in gpu.CHECKS for finding in check.run(settings(tmp_path))] == []
    assert made.open == 0


def test_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absence is not a fault."""
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: (13, 0))
    for check in gpu.CHECKS:
        with pytest.raises(NothingToLookAt, match="no NVIDIA driver"):
            list(check.run(settings(tmp_path)))


def test_the_library_is_not_installed(
    machine: Callable[..., Nvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    finding = one(gpu.library(settings(tmp_path)))
    assert finding.level == "warning" and finding.remedy == "pip install 'inprocess[nvml]'"
    with pytest.raises(NothingToLookAt):
        list(gpu.mixed(settings(tmp_path)))


def test_an_old_driver(machine: Callable[..., Nvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("model A").cuda = 12040
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: (13, 0))
    assert one(gpu.driver(settings(tmp_path))).what == "the driver has CUDA 12.4, torch is built for 13.0"


def test_more_ranks_than_gpus(machine: Callable[..., Nvml], tmp_path: Path) -> None:
    machine("model A", "model A")
    finding = one(gpu.count(settings(tmp_path, nproc=4)))
    assert finding.level == "warning" and finding.what == "4 ranks, and 2 GPUs on this host"


def test_gpus_of_several_kinds(machine: Callable[..., Nvml], tmp_path: Path) -> None:
    machine("model A", "model B", "model A")
    assert one(gpu.mixed(settings(tmp_path))).what == "GPUs of several kinds: 2 model A, 1 model B"


def test_mig(machine: Callable[..., Nvml], tmp_path: Path) -> None:
    machine("model A", "model A", "model A").mig = (0, 1)
    assert one(gpu.mig(settings(tmp_path))).what == "MIG is switched on for GPU 1"


def test_a_lost_gpu(machine: Callable[..., Nvml], tmp_path: Path) -> None:
    machine("model A", "model A").gpus[1].lose()
    finding = one(gpu.mixed(settings(tmp_path)))
    assert finding.level == "problem" and "NVML says" in finding.what
