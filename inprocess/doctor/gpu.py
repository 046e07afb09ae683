"""GPUs, as the driver's library NVML sees them. A host without any is fine."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from inprocess.doctor.findings import Check, Finding, NothingToLookAt, Settings
from inprocess.hardware.gpu import GpuLost, Unavailable, nvml

__all__ = ["CHECKS"]


Look = Callable[[Settings], Iterator[Finding]]


def _tells_of_loss(check: str) -> Callable[[Look], Look]:
    """A GPU that is lost while the check asks is what it finds."""

    def change(look: Look) -> Look:
        @functools.wraps(look)
        def changed(settings: Settings) -> Iterator[Finding]:
            try:
                yield from look(settings)
            except GpuLost as error:
                remedy = "reset it (nvidia-smi -r), or leave it out"
                yield Finding(check, "problem", str(error), "no rank can use that GPU", remedy)

        return changed

    return change


def library(settings: Settings) -> Iterator[Finding]:
    """NVML can be asked where there is a driver."""
    _need_driver(settings)
    try:
        with nvml():
            pass
    except Unavailable as error:
        yield Finding(
            "gpu.library",
            "warning",
            f"NVML cannot be asked: {error}",
            "health checks of a GPU ask it after a fault; without it they say nothing",
            "pip install 'inprocess[nvml]'",
        )


@_tells_of_loss("gpu.driver")
def driver(settings: Settings) -> Iterator[Finding]:
    """The driver is new enough for the CUDA of torch's build."""
    built = _cuda_of_torch()
    if built is None:
        raise NothingToLookAt("this build of torch has no CUDA")
    number = _ask(settings, lambda pynvml: pynvml.nvmlSystemGetCudaDriverVersion())
    has = (number // 1000, number % 1000 // 10)
    if has[0] < built[0]:
        yield Finding(
            "gpu.driver",
            "problem",
            f"the driver has CUDA {has[0]}.{has[1]}, torch is built for {built[0]}.{built[1]}",
            "ranks cannot use the GPU",
            "update the driver, or install torch's build for an older CUDA",
        )


@_tells_of_loss("gpu.count")
def count(settings: Settings) -> Iterator[Finding]:
    names = _ask(settings, _names)
    if len(names) < settings.nproc:
        yield Finding(
            "gpu.count",
            "warning",
            f"{settings.nproc} ranks, and {len(names)} GPUs on this host",
            "NCCL refuses two ranks of a group on one GPU",
            f"--nproc {max(1, len(names))}, or Gloo",
        )


@_tells_of_loss("gpu.mixed")
def mixed(settings: Settings) -> Iterator[Finding]:
    names = _ask(settings, _names)
    kinds = Counter(names)
    if len(kinds) > 1:
        yield Finding(
            "gpu.mixed",
            "warning",
            f"GPUs of several kinds: {', '.join(f'{number} {name}' for name, number in kinds.items())}",
            "after a restart a rank may have another GPU's share of the work; the slowest sets the pace of a step",
            "choose those of one kind by CUDA_VISIBLE_DEVICES",
        )


@_tells_of_loss("gpu.mig")
def mig(settings: Settings) -> Iterator[Finding]:
    modes = _ask(settings, _mig_modes)
    split = [str(index) for index, mode in enumerate(modes) if mode]
    if split:
        yield Finding(
            "gpu.mig",
            "warning",
            f"MIG is switched on for GPU {', '.join(split)}",
            "NCCL makes no group of instances of one GPU, and NVML tells less of the health of an instance",
            "one rank for each GPU, or nvidia-smi -mig 0",
        )


def _ask(settings: Settings, question: Callable[[Any], Any]) -> Any:
    """Raises NothingToLookAt without driver or library, GpuLost."""
    _need_driver(settings)
    try:
        with nvml() as pynvml:
            return question(pynvml)
    except Unavailable as error:
        raise NothingToLookAt(str(error)) from None


def _names(pynvml: Any) -> list[str]:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def _mig_modes(pynvml: Any) -> list[bool]:
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(bool(pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))[0]))
        except pynvml.NVMLError_NotSupported:
            found.append(False)
    return found


def _need_driver(settings: Settings) -> None:
    if not os.path.exists(os.path.join(settings.root, "proc/driver/nvidia/version")):
        raise NothingToLookAt("there is no NVIDIA driver here")


def _cuda_of_torch() -> tuple[int, int] | None:
    try:
        from torch.version import cuda  # noqa: PLC0415  # may be what does not work
    except (ImportError, OSError):
        return None
    major, _, minor = (cuda or "").partition(".")
    return (int(major), int(minor.partition(".")[0] or 0)) if major else None


CHECKS = (
    Check(
        "gpu.library",
        "NVML can be asked where there is a driver: health checks need it",
        "pip install 'inprocess[nvml]'",
        library,
    ),
    Check(
        "gpu.driver",
        "the driver is new enough for the CUDA of torch's build",
        "update the driver, or install torch's build for an older CUDA",
        driver,
    ),
    Check(
        "gpu.count",
        "there is a GPU for each rank of this host",
        "fewer ranks, or Gloo",
        count,
    ),
    Check(
        "gpu.mixed",
        "all GPUs are of one kind: after a restart a rank may have another share of the work",
        "choose those of one kind by CUDA_VISIBLE_DEVICES",
        mixed,
    ),
    Check(
        "gpu.mig",
        "MIG is switched off: NCCL makes no group of instances of one GPU",
        "one rank for each GPU, or nvidia-smi -mig 0",
        mig,
    ),
)
