"""Every public name is importable from the module that it was first published in, wherever its code is now."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

#: module -> names
PUBLIC = {
    "abort": "Abort AbortTorchDistributed AbortTransformerEngine Ladder StepResult shutdown_gloo_connections",
    "attribution": "Interruption InterruptionRecord is_echo one_line ranges standstill summary",
    "call_wrapper": "CallWrapper current_call",
    "completion": "Completion",
    "compose": "Compose",
    "etcd_store": "EtcdStore",
    "exception": (
        "BadMessage Fenced HealthCheckError InternalError LiveStateError OptionError RankDiscarded "
        "RankShouldRestart RestartAbort RestartError StateLost StoreLost TimeoutError"
    ),
    "finalize": "Finalize ThreadedFinalize",
    "health_check": (
        "ChainedGPUHealthCheck ChainedNVLHealthCheck ChainedNicHealthCheck CudaHealthCheck FaultCounter "
        "FaultCounterExceeded HealthCheck"
    ),
    "initialize": "Initialize RetryController",
    "learned": "LearnedTimeouts",
    "live.sampler": "ElasticSampler",
    "live.state": "LiveState",
    "live.tree": "Path Record Stateful dotted into leaves local read replaced shard_of take",
    "monitor_process": "MonitorConfig MonitorProcess reap_lingering",
    "monitor_thread": "LetIn Mailbox MonitorThread RankShouldRestart WayIn",
    "nested_restarter": (
        "NestedRestarterAborted NestedRestarterFinalized NestedRestarterHandlingCompleted "
        "NestedRestarterHandlingStarting"
    ),
    "progress_watchdog": "ProgressWatchdog Silence",
    "rank_assignment": (
        "ActivateAllRanks ActiveWorldSizeDivisibleBy FillGaps FilterCountGroupedByKey FilterGroupedByKey "
        "Layer LayerFlag MaxActiveWorldSize RankAssignment RankAssignmentCtx RankDiscarded RankFilter "
        "ShiftRanks Tree gather"
    ),
    "rank_filter": "ActiveWorldSizeDivisibleBy MaxActiveWorldSize RankFilter WorldSizeDivisibleBy",
    "run": "main program",
    "state": "FrozenState Mode State Status",
    "store": (
        "BarrierError BarrierTimeout EtcdStore FileStore PrefixStore Seat StoreMixin StoreSpec TCPStore "
        "await_name connect drive listen own_address serve"
    ),
    "terminate": "Terminate",
    "testing": (
        "At Command Deadline Exit Fault Hang HoldGIL HostLoss Job Kill Missing NetworkCut Raise RankResult "
        "Result Segfault SlowDown Stop StoreLoss Terminate When here random_faults"
    ),
    "tools.inject_fault": (
        "Fault InjectedException clear_workload_exception inject_fault maybe_raise_workload_exception"
    ),
    "wait_daemon": "main wait_daemon",
    "watch": "ACTIONS Action Watch announce_nobody_left announce_over announce_wrapped ask_launcher monitored",
    "wrap": "CallWrapper Wrapper",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str) -> None:
    found = importlib.import_module(f"inprocess.{module}")
    assert not [name for name in PUBLIC[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("name", ["EtcdStore", "FileStore", "PrefixStore", "TCPStore"])
def test_a_store_is_in_the_module_that_it_names(name: str) -> None:
    """A monitor process imports it from there, so a Wrapper looks whether it is there. In a process of its own: here
    another test may have imported that module."""
    program = (
        f"import sys; from inprocess.store import {name} as it; print(vars(sys.modules[it.__module__])['{name}'] is it)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
