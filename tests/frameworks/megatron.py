"""A training that sets up its restarts with the parts and the options that Megatron-LM's own uses.

That is: reserves in a `Tree`, nested restarters, a health check, a finalize with a limit, stores of the process group
and of the restarts on ports of their own, and an abort hook that ends the writers of asynchronous checkpoints. The file
of Megatron-LM is not in its package; the calls are those of its documentation, the checkpoints Megatron-Core's.
"""

from __future__ import annotations

import datetime
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import inprocess
from inprocess import nested_restarter
from inprocess.abort import Abort, AbortTorchDistributed, AbortTransformerEngine
from inprocess.finalize import ThreadedFinalize
from inprocess.health_check import CudaHealthCheck
from inprocess.initialize import RetryController
from inprocess.rank_assignment import Layer, LayerFlag, Tree
from inprocess.testing import At, Job, Kill, Raise, here
from tests.harness import ReservedPort

from .kept import PATIENT
from .programs import data, model, same, weights

STEPS, ACTIVE = 12, 2
#: the checkpoint of step 4 is whole by then, and that of step 8 is written
PLACES: list[dict[str, Any]] = [{"step": 9}, {"label": "backward", "step": 9}, {"label": "scheduled", "step": 8}]
LIMIT = datetime.timedelta(seconds=60)


def write(path: str, state: Any) -> None:
    """In a process of its own, as Megatron-Core writes checkpoints; whole only under its last name."""
    torch.save(state, f"{path}.part")


class AbortCheckpoint(Abort):
    """Ends the writers of checkpoints that are under way. The next queue counts from 0, as a reserve does."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.queue = make, make()

    def __call__(self, state: Any) -> Any:
        before, self.queue = self.queue, self.make()
        for each in before.async_calls:
            each.async_caller.close(abort=True)
        return state


def destroy_state() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def pretrain(folder: str, group_port: int, store_port: int) -> Any:
    """The decorator gets its arguments at run time, and the store of the groups is outside of the wrapped function."""
    from megatron.core.dist_checkpointing.strategies import async_utils

    # the two questions to a GPU that are asked on the way
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    store = dist.TCPStore("127.0.0.1", group_port, is_master=os.environ["RANK"] == "0", timeout=LIMIT)
    checkpoints = AbortCheckpoint(async_utils.AsyncCallsQueue)
    layer = Layer(min_ranks=ACTIVE, max_ranks=ACTIVE, flag=LayerFlag.RESERVE)
    wrapper = inprocess.Wrapper(
        store_kwargs={"timeout": LIMIT, "port": store_port},
        initialize=inprocess.Compose(
            RetryController(min_world_size=ACTIVE), nested_restarter.NestedRestarterHandlingCompleted()
        ),
        abort=inprocess.Compose(
            AbortTransformerEngine(),
            AbortTorchDistributed(),
            checkpoints,
            nested_restarter.NestedRestarterHandlingStarting(),
        ),
        completion=nested_restarter.NestedRestarterFinalized(),
        terminate=nested_restarter.NestedRestarterAborted(),
        health_check=CudaHealthCheck(timeout=datetime.timedelta(seconds=10)),
        finalize=ThreadedFinalize(timeout=datetime.timedelta(seconds=10), fn=destroy_state),
        rank_assignment=Tree(layers=[layer]),
        max_repeats=None,
    )
    return wrapper(train)(folder, store, checkpoints)


def train(
    folder: str, store: Any, checkpoints: AbortCheckpoint, inprocess_call_wrapper: inprocess.CallWrapper = None
) -> Any:  # type: ignore[assignment]
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from torch.nn.parallel import DistributedDataParallel

    call, queue = inprocess_call_wrapper, checkpoints.queue
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    of_iteration = dist.PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=of_iteration, rank=rank, world_size=size, timeout=LIMIT)
    parallel_state.initialize_model_parallel()
    net = model()
    whole = sorted(int(path.stem) for path in pathlib.Path(folder).glob("*.pt"))
    step = whole[-1] if whole else 0
    if step:
        net.load_state_dict(torch.load(f"{folder}/{step}.pt"))
    here("resume", step=step)
    parallel = DistributedDataParallel(net, process_group=parallel_state.get_data_parallel_group())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, targets = data().tensors  # type: ignore[attr-defined]
    while step < STEPS:
        call.ping()
        optimizer.zero_grad()
        rows = slice(8 * (step % 8) + 4 * rank, 8 * (step % 8) + 4 * rank + 4)
        loss = torch.nn.functional.mse_loss(parallel(inputs[rows]), targets[rows])
        here("backward")
        loss.backward()
        optimizer.step()
        step += 1
        if step % 4 == 0:
            queue.maybe_finalize_async_calls(blocking=True)
            path = f"{folder}/{step}.pt"
            state = {name: value.clone() for name, value in net.state_dict().items()}
            finish = [functools.partial(os.replace, f"{path}.part", path)] if rank == 0 else []
            queue.schedule_async_request(AsyncRequest(write if rank == 0 else None, (path, state), finish))
            here("scheduled")
    queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    return weights(net)


def run_of(job: Any, folder: Any, **more: Any) -> Any:
    with ReservedPort() as one, ReservedPort() as other:
        return job.run(pretrain, str(folder), one.number, other.number, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_of(Job(3, **PATIENT), tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("fault", [Raise(OSError), Kill()], ids=["raise", "kill"])
def test_a_reserve_takes_the_place(ranks: Any, tmp_path: Any, undisturbed: Any, place: Any, fault: Any) -> None:
    """Two train, whoever they are, so the weights are those without a fault."""
    run = run_of(ranks(3, **PATIENT), tmp_path, faults={At(rank=1, **place): fault})
    assert run.world_sizes == [2, 2]
    (expected, *_) = [value for value in undisturbed.values if value]
    found = [value for value in run.values if value]
    assert len(found) == 2 and all(same(value, expected) for value in found)
    run.assert_resumed_from(4)


def test_twenty_restarts_leave_nothing(ranks: Any, tmp_path: Any) -> None:
    faults = {At(rank=i % 2, step=5, iteration=i): Raise(OSError) for i in range(20)}
    run = run_of(ranks(3, **PATIENT), tmp_path, faults=faults)
    assert run.restarts == 20 and run.same_pids
    run.assert_nothing_grows()
