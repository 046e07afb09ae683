"""Health checks: absent hardware is no fault, present faults are; with a fake CUDA, NVML and device tree."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from inprocess import health_check
from inprocess.exception import HealthCheckError, OptionError
from inprocess.hardware import gpu
from inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
)
from inprocess.state import FrozenState, State
from tests.unit.fake_nvml import FakeGpu, FakeNvml
from tests.unit.test_nic import Tree, write

STATE = FrozenState(rank=0, world_size=1, initial_rank=0, initial_world_size=1)


def failed(iteration: int, error: Exception) -> FrozenState:
    return dataclasses.replace(STATE, iteration=iteration, fn_exception=error)


def test_fault_counter_counts_own_faults() -> None:
    check = FaultCounter(2)
    for i in range(2):
        check(failed(i, ValueError()))
        check(STATE)  # before the next iteration, or after a fault of another rank
    assert check.faults == 2
    with pytest.raises(FaultCounterExceeded, match="failed 3 times, more than max_rank_faults=2"):
        check(failed(2, ValueError()))
    assert issubclass(FaultCounterExceeded, HealthCheckError)


def test_checks_in_the_older_form() -> None:
    """As subclasses call them: the exception beside the state, and both come back."""
    check, state, error = FaultCounter(1), State(0, 1), ValueError()
    assert check(state, None) == (state, None)
    assert check(state, error) == (state, error)
    with pytest.raises(FaultCounterExceeded):
        check(state, error)
    assert CudaHealthCheck()(state, error) == (state, error)


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
    with pytest.raises(OptionError, match=r"pass a list of names, nics=\['mlx5_0'\]"):
        ChainedNicHealthCheck(nics="mlx5_0")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was asked or said before, and no variable names a GPU."""
    monkeypatch.setattr(health_check, "_told", set())
    monkeypatch.setattr(gpu, "_found", {})
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_absent_hardware_is_not_checked_and_told_once(plain, monkeypatch, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.DEBUG, "inprocess")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    checks = [
        CudaHealthCheck(),
        ChainedGPUHealthCheck(),
        ChainedNVLHealthCheck(),
        ChainedNicHealthCheck(sysfs=tmp_path, nics=["mlx5_0"]),
    ]
    for check in checks * 2:
        assert check(STATE) is STATE
    messages = told(caplog)
    what = ["CUDA", "the GPU", "NVLink", "the network adapter"]
    assert [message.split(" is not checked: ")[0] for message in messages] == what
    assert "pip install inprocess[nvml]" in messages[1]
    assert "mlx5_0" in messages[3]


# --- CUDA


class Cuda:
    """A fake CUDA: what was asked of which device, and how each step goes."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.synchronized = lambda: None
        self.computed = torch.arange

    def synchronize(self, device: int) -> None:
        self.asked.append(f"synchronize {device}")
        self.synchronized()

    def arange(self, size: int, device: str) -> torch.Tensor:
        self.asked.append(f"compute {device}")
        return self.computed(size)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, count: int = 8, current: int = 0) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    known = SimpleNamespace(uuid="12-34", pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch, "arange", fake.arange)
    return fake


@pytest.mark.parametrize(
    ("local_rank", "count", "current", "device"),
    [
        ("3", 8, 0, 3),
        ("3", 1, 0, 0),  # CUDA_VISIBLE_DEVICES shows each process only its own
        ("3", 2, 0, 0),
        ("3", 8, 5, 5),  # the program chose
        (None, 8, 2, 2),
        (None, 8, 0, 0),
        ("x", 8, 0, 0),
    ],
)
def test_waits_computes_and_waits_on_the_right_device(plain, monkeypatch, local_rank, count, current, device) -> None:
    cuda = fake_cuda(monkeypatch, count, current)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert CudaHealthCheck(5)(STATE) is STATE
    assert cuda.asked == [f"synchronize {device}", f"compute cuda:{device}", f"synchronize {device}"]


def test_who_does_not_use_cuda_gets_no_context(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine with GPUs: nothing is called that would begin to use one."""
    cuda = fake_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "device_count", "current_device", "get_device_properties", "init", "_lazy_init"):
        monkeypatch.delattr(torch.cuda, name)
    assert CudaHealthCheck()(STATE) is STATE
    assert cuda.asked == []


def test_a_lost_context_is_a_fault(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)

    def broken() -> None:
        raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered")

    cuda.synchronized = broken
    with pytest.raises(HealthCheckError) as raised:
        CudaHealthCheck(5)(STATE)
    assert str(raised.value).splitlines() == [
        "CUDA device 0 (GPU 0000:4b:00.0, waiting for earlier work) fails: CUDA error: device-side assert triggered",
        "The CUDA context of this process is lost: no restart inside this process brings it back, start a new process",
    ]
    assert cuda.asked == ["synchronize 0"]


def test_a_context_so_lost_that_it_does_not_say_its_device(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)

    def broken() -> int:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "current_device", broken)
    with pytest.raises(HealthCheckError, match=r"CUDA fails: unspecified launch failure\nThe CUDA context .* is lost"):
        CudaHealthCheck(5)(STATE)


def test_a_process_that_may_have_no_more_threads_has_no_lost_context(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, check = fake_cuda(monkeypatch), CudaHealthCheck(5)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as now:
        now.setattr(threading.Thread, "start", refuse)
        assert check(STATE) is STATE and cuda.asked == []
    assert check(STATE) is STATE and cuda.asked != []


def test_an_error_of_the_last_wait(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)

    def broken() -> None:
        if len(cuda.asked) == 3:
            raise RuntimeError("uncorrectable ECC error encountered")

    cuda.synchronized = broken
    with pytest.raises(HealthCheckError, match=r"waiting for the computation\) fails: .*ECC.*\n.* is lost"):
        CudaHealthCheck(5)(STATE)


def test_a_failing_computation_need_not_lose_the_context(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)

    def broken(size: int) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    cuda.computed = broken
    with pytest.raises(HealthCheckError, match=r"in a small computation\) fails: no kernel image") as raised:
        CudaHealthCheck(5)(STATE)
    assert "is lost" not in str(raised.value)
    assert cuda.asked == ["synchronize 0", "compute cuda:0", "synchronize 0"]


def test_wrong_results_are_a_fault(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch).computed = torch.ones
    with pytest.raises(HealthCheckError, match=r"wrong results: 1000\.0 instead of 332833500"):
        CudaHealthCheck(5)(STATE)


def test_full_memory_is_no_fault(plain, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    caplog.set_level(logging.DEBUG, "inprocess")
    cuda = fake_cuda(monkeypatch)

    def full(size: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    cuda.computed = full
    assert CudaHealthCheck(5)(STATE) is STATE
    assert cuda.asked == ["synchronize 0", "compute cuda:0", "synchronize 0"]
    assert told(caplog) == ["what CUDA computes is not checked: CUDA out of memory"]


def test_a_gpu_that_does_not_answer(plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for it does nothing more once it answers; a check before that starts no other one."""
    cuda, answers, check = fake_cuda(monkeypatch), threading.Event(), CudaHealthCheck(0.02)
    cuda.synchronized = answers.wait
    stuck = r"CUDA device 0 \(GPU 0000:4b:00.0, waiting for earlier work\)"
    with pytest.raises(HealthCheckError, match=rf"{stuck} did not answer within timeout=0.02s"):
        check(STATE)
    (thread,) = (each for each in threading.enumerate() if each.name == "inprocess-CudaHealthCheck")
    assert thread.daemon
    with pytest.raises(HealthCheckError, match=rf"{stuck} still does not answer since an earlier check"):
        check(STATE)
    answers.set()
    thread.join(5)
    assert cuda.asked == ["synchronize 0"]
    check.timeout = 5
    assert check(STATE) is STATE


# --- NVML


@pytest.fixture
def nvml(plain, monkeypatch: pytest.MonkeyPatch):
    """A machine with one GPU."""
    fake = FakeNvml(FakeGpu("GPU-12-34", "00000000:4B:00.0", links={0: 1, 1: 1, 2: 0}))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake
    assert fake.open == 0


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, "a reset of the GPU"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT, "a reboot of the node"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, "draining of peer-to-peer traffic"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET, "draining and a reset of the GPU"),
        (99, "action 99"),
    ],
)
def test_recovery_actions(nvml: FakeNvml, action: int, words: str) -> None:
    check = ChainedGPUHealthCheck()
    assert check(STATE) is STATE
    nvml.gpus[0].action = action
    with pytest.raises(HealthCheckError, match=f"GPU 0000:4b:00.0: the driver asks for {words}$"):
        check(STATE)
    assert nvml.open == 0


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
@pytest.mark.parametrize("function", ["by index", "fields", "ECC", "rows", "pages", "link 1"])
def test_a_lost_gpu(nvml: FakeNvml, function: str, error: int) -> None:
    """Whichever question finds it."""
    nvml.gpus[0].errors[function] = error
    check = ChainedNVLHealthCheck() if function == "link 1" else ChainedGPUHealthCheck()
    with pytest.raises(HealthCheckError, match=f"is lost: NVML says: {pynvml.NVMLError(error)}"):
        check(STATE)
    assert nvml.open == 0


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_lost_gpu_that_says_so_as_the_value_of_a_field(nvml: FakeNvml, error: int) -> None:
    nvml.gpus[0].action_error = error
    with pytest.raises(HealthCheckError, match=r"GPU 0000:4b:00\.0 is lost"):
        ChainedGPUHealthCheck()(STATE)


def test_memory_errors_since_the_first_look(nvml: FakeNvml) -> None:
    nvml.gpus[0].uncorrected = 5
    check = ChainedGPUHealthCheck()
    assert check(STATE) is STATE  # those are older than the job
    nvml.gpus[0].uncorrected = 7
    for _ in range(2):  # the GPU is no better at the second look
        with pytest.raises(HealthCheckError, match=r"GPU 0000:4b:00\.0: 2 memory errors since the first look"):
            check(STATE)
    nvml.gpus[0].uncorrected = 0  # the driver was loaded anew
    assert check(STATE) is STATE
    nvml.gpus[0].uncorrected = 1
    with pytest.raises(HealthCheckError, match="1 memory errors"):
        check(STATE)


def test_memory_errors_are_counted_for_each_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program chose its GPU after the first look."""
    nvml.gpus.append(FakeGpu("GPU-56-78", "00000000:5B:00.0", uncorrected=3))
    check = ChainedGPUHealthCheck()
    assert check(STATE) is STATE
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert check(STATE) is STATE


def test_a_row_that_could_not_be_remapped(nvml: FakeNvml) -> None:
    nvml.gpus[0].rows = (0, 9, 0, 0)
    check = ChainedGPUHealthCheck()
    assert check(STATE) is STATE  # remapped rows are good rows
    nvml.gpus[0].rows = (0, 9, 0, 1)
    with pytest.raises(HealthCheckError, match="could not be remapped; it must be replaced"):
        check(STATE)


def test_rows_that_will_be_remapped_are_told_once(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.gpus[0].rows = (0, 1, 1, 0)
    check = ChainedGPUHealthCheck()
    assert check(check(STATE)) is STATE
    assert told(caplog) == [
        "GPU 0000:4b:00.0 will remap bad rows of its memory at its next reset; it goes on until then"
    ]


def test_pages_that_wait_for_a_reboot(nvml: FakeNvml) -> None:
    nvml.gpus[0].pages = pynvml.NVML_FEATURE_ENABLED
    with pytest.raises(HealthCheckError, match="bad pages of its memory stay in use until a reboot"):
        ChainedGPUHealthCheck()(STATE)


def test_what_a_gpu_does_not_support_is_not_checked(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    """Each part for itself: the last one still finds its fault."""
    caplog.set_level(logging.DEBUG, "inprocess")
    gpu, check = nvml.gpus[0], ChainedGPUHealthCheck()
    gpu.action_error = pynvml.NVML_ERROR_NOT_SUPPORTED
    gpu.errors = {"ECC": pynvml.NVML_ERROR_NOT_SUPPORTED, "rows": pynvml.NVML_ERROR_NO_PERMISSION}
    assert check(check(STATE)) is STATE
    assert told(caplog) == [
        "the GPU's recovery action is not checked: NVML says: Not Supported",
        "ECC is not checked: NVML says: Not Supported",
        "remapping of memory rows is not checked: NVML says: Insufficient Permissions",
    ]
    gpu.pages = 1
    with pytest.raises(HealthCheckError, match="bad pages"):
        check(STATE)


def test_an_older_pynvml_does_not_know_the_recovery_action(nvml: FakeNvml, caplog) -> None:
    caplog.set_level(logging.DEBUG, "inprocess")

    class Older(FakeNvml):
        def __getattr__(self, name: str) -> object:
            if "RECOVERY_ACTION" in name:
                raise AttributeError(f"module 'pynvml' has no attribute '{name}'")
            return super().__getattr__(name)

    nvml.__class__ = Older
    check = ChainedGPUHealthCheck()
    assert check(STATE) is STATE
    assert "no attribute 'NVML_FI_DEV_GET_GPU_RECOVERY_ACTION'" in caplog.text
    nvml.gpus[0].rows = (0, 0, 0, 1)
    with pytest.raises(HealthCheckError, match="could not be remapped"):
        check(STATE)


@pytest.mark.parametrize(
    "error",
    [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION],
)
def test_no_driver_is_no_fault(nvml: FakeNvml, caplog: pytest.LogCaptureFixture, error: int) -> None:
    caplog.set_level(logging.DEBUG, "inprocess")
    nvml.init_error = error
    for check in (ChainedGPUHealthCheck(), ChainedNVLHealthCheck()):
        assert check(check(STATE)) is STATE
    why = f"is not checked: NVML says: {pynvml.NVMLError(error)}"
    assert told(caplog) == [f"the GPU {why}", f"NVLink {why}"]


def test_a_driver_that_does_not_answer(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(health_check, "_NVML_TIMEOUT", 0.02)
    monkeypatch.setattr(nvml, "nvmlDeviceGetRemappedRows", lambda handle: answers.wait() and (0, 0, 0, 0))
    with pytest.raises(HealthCheckError, match=r"GPU 0000:4b:00\.0: the driver did not answer within 0\.02s"):
        ChainedGPUHealthCheck()(STATE)
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "inprocess-NVML":
            thread.join(5)


def test_the_whole_gpu_is_asked_for_a_mig_instance(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.gpus[0].instances = ("MIG-56-78",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-56-78")
    checks = [ChainedGPUHealthCheck(), ChainedNVLHealthCheck()]
    assert [check(STATE) for check in checks] == [STATE, STATE]
    nvml.gpus[0].action, nvml.gpus[0].links = 1, {0: 0, 1: 1, 2: 0}
    for check in checks:
        with pytest.raises(HealthCheckError, match=r"GPU 0000:4b:00\.0"):
            check(STATE)


def test_nvlinks_that_went_down(nvml: FakeNvml) -> None:
    check, links = ChainedNVLHealthCheck(), nvml.gpus[0].links
    assert check(STATE) is STATE  # link 2 was never up
    links[2] = 1
    assert check(STATE) is STATE
    links.update({0: 0, 2: 0})
    for _ in range(2):
        with pytest.raises(HealthCheckError, match=r"GPU 0000:4b:00\.0: NVLinks \[0, 2\] went down"):
            check(STATE)
    links.update({0: 1, 2: 1})
    assert check(STATE) is STATE


def test_an_nvlink_that_cannot_be_asked_any_more_is_not_down(nvml: FakeNvml) -> None:
    check = ChainedNVLHealthCheck()
    assert check(STATE) is STATE
    nvml.gpus[0].errors["link 1"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert check(STATE) is STATE


# --- network adapters


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_nic_near_the_gpu_only(nvml: FakeNvml, tree: Tree) -> None:
    near = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    far = tree.adapter("mlx5_1", "pci0000:80/0000:81:00.0")
    check = ChainedNicHealthCheck(sysfs=tree.path)
    assert check(STATE) is STATE
    write(far / "counters/link_downed", "5")
    assert check(STATE) is STATE
    write(near / "counters/link_downed", "1")
    with pytest.raises(HealthCheckError, match=r"link lost: mlx5_0 port 1 \(4: ACTIVE\)"):
        check(STATE)
    assert check(STATE) is STATE  # it came back: reported once
    write(near / "state", "1: DOWN")
    for _ in range(2):
        with pytest.raises(HealthCheckError, match=r"mlx5_0 port 1 \(1: DOWN\)"):
            check(STATE)


def test_cuda_in_use_tells_the_place_of_the_gpu_without_nvml(plain, monkeypatch, tree: Tree) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    fake_cuda(monkeypatch)
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    check = ChainedNicHealthCheck(sysfs=tree.path)
    assert check(STATE) is STATE
    write(port / "state", "1: DOWN")
    with pytest.raises(HealthCheckError, match="mlx5_0"):
        check(STATE)


def test_nic_that_vanished(nvml: FakeNvml, tree: Tree) -> None:
    """It was the nearest; that another one is now does not hide it."""
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    tree.adapter("mlx5_1", "pci0000:40/0000:5a:00.0/0000:5c:00.0")
    check = ChainedNicHealthCheck(sysfs=tree.path)
    assert check(STATE) is STATE
    (tree.path / "class/infiniband/mlx5_0").unlink()
    shutil.rmtree(port.parents[3])
    for _ in range(2):
        with pytest.raises(HealthCheckError, match=r"link lost: mlx5_0 port 1 \(gone\)"):
            check(STATE)


def test_all_of_infiniband_vanished(nvml: FakeNvml, tree: Tree) -> None:
    tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    check = ChainedNicHealthCheck(sysfs=tree.path)
    assert check(STATE) is STATE
    shutil.rmtree(tree.path / "class")
    with pytest.raises(HealthCheckError, match=r"mlx5_0 port 1 \(gone\)"):
        check(STATE)


def test_nic_of_a_gpu_that_was_chosen_after_the_first_look(nvml: FakeNvml, tree: Tree, monkeypatch) -> None:
    """The adapter near the other GPU is none of this rank's."""
    other = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    tree.adapter("mlx5_1", "pci0000:80/0000:81:00.0/0000:83:00.0")
    place = tree.path / "devices/pci0000:80/0000:81:00.0/0000:82:00.0"
    place.mkdir()
    (tree.path / "bus/pci/devices/0000:82:00.0").symlink_to(place)
    check = ChainedNicHealthCheck(sysfs=tree.path)
    assert check(STATE) is STATE
    nvml.gpus.append(FakeGpu("GPU-56-78", "00000000:82:00.0"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    write(other / "state", "1: DOWN")
    assert check(STATE) is STATE


def test_a_port_that_tells_nothing(plain, tree: Tree) -> None:
    """It may be gone between two looks, or never have been a port."""
    port = tree.adapter("mlx5_1", "pci0000:80/0000:81:00.0")
    (port / "state").unlink()
    check = ChainedNicHealthCheck(nics=["mlx5_1"], sysfs=tree.path)
    assert check(STATE) is STATE
    write(port / "state", "1: DOWN")
    assert check(STATE) is STATE  # it was never up


def test_nic_by_name_that_is_not_active_any_more(plain, tree: Tree) -> None:
    port = tree.adapter("mlx5_1", "pci0000:80/0000:81:00.0")
    check = ChainedNicHealthCheck(nics=["mlx5_1"], sysfs=tree.path)
    assert check(STATE) is STATE
    write(port / "state", "2: INIT")
    with pytest.raises(HealthCheckError, match=r"mlx5_1 port 1 \(2: INIT\)"):
        check(STATE)


def test_a_name_that_no_adapter_has(plain, tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    tree.adapter("mlx5_1", "pci0000:80/0000:81:00.0")
    check = ChainedNicHealthCheck(nics=["mlx_51"], sysfs=tree.path)
    for _ in range(2):
        assert check(STATE) is STATE
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "the network adapter is not checked: none is there, or near this rank's GPU (nics=('mlx_51',))")
    ]


def test_an_interface_of_roce_that_was_down_meanwhile(nvml: FakeNvml, tree: Tree) -> None:
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    counter = tree.ethernet(port, "eth4", downs="1")
    check = ChainedNicHealthCheck(sysfs=tree.path)
    assert check(STATE) is STATE
    write(counter, "2")
    with pytest.raises(HealthCheckError, match="mlx5_0 port 1"):
        check(STATE)


def test_nics_without_a_gpu_are_not_checked(nvml: FakeNvml, tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "inprocess")
    nvml.gpus.clear()
    port = tree.adapter("mlx5_0", "pci0000:40/0000:4a:00.0/0000:4c:00.0")
    check = ChainedNicHealthCheck(sysfs=tree.path)
    check(STATE)
    write(port / "state", "1: DOWN")
    assert check(STATE) is STATE
    assert [message.split(":")[0] for message in told(caplog)] == [
        "the GPU's PCI address is not checked",
        "the network adapter is not checked",
    ]


def test_the_place_of_a_lost_gpu(nvml: FakeNvml, tree: Tree) -> None:
    nvml.gpus[0].lose()
    with pytest.raises(HealthCheckError, match="is lost"):
        ChainedNicHealthCheck(sysfs=tree.path)(STATE)
