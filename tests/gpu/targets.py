"""The functions that ranks run on a GPU, or in a dry run on the CPU. As in tests/ranks/targets.py.

Before a fault the others report that they wait (or nearly so), and the fault is held back until they do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from inprocess import LiveState
from inprocess.abort import AbortTorchDistributed
from inprocess.health_check import CudaHealthCheck
from inprocess.initialize import RetryController
from inprocess.tools.inject_fault import Fault
from tests.harness import launch
from tests.harness.child import Context
from tests.ranks.targets import LONG, place_in_world, strike

#: cuda, or cpu for a dry run
ON = os.environ.get("INPROCESS_GPU_TESTS_ON", "cuda")
#: for tests of hangs. Four ranks that make their communicators on one GPU need seconds, in which they show no progress
HASTY = launch.KILLING if ON == "cpu" else launch.HASTY | {"soft_timeout": 10, "hard_timeout": 14}
#: of the GPU's memory, for one rank
SHARE = 0.05


def device() -> torch.device:
    return torch.device("cpu") if ON == "cpu" else torch.device("cuda", 0)


def warm_up(rank: int) -> None:
    """Before anybody is watched: the first use of CUDA takes seconds."""
    if device().type == "cuda":
        torch.cuda.set_device(device())
        torch.ones(1, device=device()).sum().item()


def join(backend: str = "", **options: Any) -> tuple[int, int]:
    """Make the process group; answers rank and world size."""
    rank, size = place_in_world()
    dist.init_process_group(backend or ("nccl" if device().type == "cuda" else "gloo"), timeout=LONG, **options)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    return rank, size


def check_sum(group: Any = None, on: torch.device | None = None) -> None:
    """One all-reduce; its sum is right only if exactly the ranks of the group take part. Waits for the GPU."""
    tensor = torch.tensor([dist.get_rank(group) + 1], device=on or device())
    dist.all_reduce(tensor, group=group)
    size = dist.get_world_size(group)
    assert tensor.item() == size * (size + 1) // 2, f"sum {tensor.item()} with {size} ranks"


# --- one group


def train(context: Context, call: Any) -> list[int]:
    """Steps with an all-reduce each. Returns [iteration, rank, world size]."""
    backend = context.args.get("backend", "")
    rank, size = join(backend, device_id=device()) if context.args.get("eager") else join(backend)
    context.point("made")
    for step in range(3):
        if step == 1 and call.iteration == 0:
            context.emit("waits")
        context.point(step)
        check_sum()
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def run_train(context: Context) -> Any:
    return context.wrap(train)()


# --- faults of inject_fault


def checked(context: Context) -> dict[str, Any]:
    """A GPU that does not answer is noticed before its rank is killed."""
    return {**HASTY, "health_check": CudaHealthCheck(timeout=4)}


def run_injected(context: Context) -> Any:
    return context.wrap(injected)()


def injected(context: Context, call: Any) -> list[int]:
    """In the first iteration a fault strikes rank 1 before a step: a forward and an all-reduce."""
    if device().type == "cuda":
        torch.cuda.set_per_process_memory_fraction(SHARE)
        context.emit("memory", allocated=torch.cuda.memory_allocated())
    rank, size = join()
    model = torch.nn.Linear(2, 2, device=device())
    for step in range(3):
        if (step, call.iteration, context.rank) == (1, 0, 1):
            strike(Fault(context.args["fault"]))
            if context.args.get("raises"):
                raise ValueError("after the fault")
        model(torch.ones(2, device=device()))
        check_sum()
    dist.destroy_process_group()
    return [call.iteration, rank, size]


# --- several groups


def run_groups(context: Context) -> Any:
    return context.wrap(groups)()


def groups(context: Context, call: Any) -> list[int]:
    """A round of collectives, and another one in which a rank does not take part."""
    rank, size, round_of_collectives = GROUPS[context.args["kind"]]()
    round_of_collectives()
    if call.iteration == 0:
        context.emit("waits")
    context.point("fault")
    round_of_collectives()
    del round_of_collectives
    dist.destroy_process_group()
    return [call.iteration, rank, size]


Groups = tuple[int, int, Callable[[], None]]


def _subgroups() -> Groups:
    """Pairs, and a second group of all: where rank 1 is missing, rank 0 waits in the pair and others in the group."""
    rank, size = join()
    pairs = [dist.new_group([*range(size)][first : first + 2], timeout=LONG) for first in range(0, size, 2)]
    everybody = dist.new_group(timeout=LONG)

    def each() -> None:
        check_sum(pairs[rank // 2])
        check_sum(everybody)
        check_sum()

    return rank, size, each


def _mesh() -> Groups:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, size = join()
    shape = (size // 2, 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("outer", "inner"))
    whole = torch.arange(4 * size, dtype=torch.float32, device=device())

    def each() -> None:
        parts = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
        assert parts.to_local().numel() == 4
        assert torch.equal((parts * 2).full_tensor(), whole * 2)
        check_sum(mesh["inner"].get_group())

    return rank, size, each


def _mixed() -> Groups:
    """A pending collective on the CPU and one on the GPU at the same time."""
    rank, size = join("cpu:gloo,cuda:nccl" if device().type == "cuda" else "cpu:gloo")

    def each() -> None:
        tensors = [torch.ones(3), torch.ones(3, device=device())]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert tensor.tolist() == [size] * 3

    return rank, size, each


GROUPS: dict[str, Callable[[], Groups]] = {"subgroups": _subgroups, "mesh": _mesh, "mixed": _mixed}


# --- a CUDA graph


def run_graph(context: Context) -> Any:
    kept: list[Any] = []  # outlives the iteration if args["kept"]

    def replay(context: Context, call: Any) -> list[int]:
        kept.clear()
        rank, size = join()
        tensor = torch.ones(1, device=device())
        dist.all_reduce(tensor)  # makes the communicator, which cannot be done in a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(tensor)
        if context.args["kept"] and call.iteration == 0:
            kept.append(graph)
        for step in range(2):
            if step == 1 and call.iteration == 0:
                context.emit("waits")
            context.point(step)
            graph.replay()
            assert tensor.item() == size ** (step + 2)
        del graph  # before the communicator, which waits for it
        dist.destroy_process_group()
        return [call.iteration, rank, size]

    return context.wrap(replay)()


# --- training


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(device())


def run_ddp(context: Context) -> Any:
    return context.wrap(ddp)()


def ddp(context: Context, call: Any) -> list[int]:
    rank, size = join()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and call.iteration == 0:
            context.emit("waits")
        context.point(step)
        learn(model, optimizer, rank)
    check_sum()
    del model, optimizer  # before the group: as its last owner the model would end it with Python's lock held
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    loss = model(torch.full((16, 8), 1.0 + rank, device=device())).square().mean()
    loss.backward()
    optimizer.step()
    assert loss.isfinite().item()


def run_live(context: Context) -> Any:
    """Returns [iteration, rank, world size] of the last iteration, and where the state came from in each."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # its steps are on the host
    live = LiveState(model=model, optim=optimizer)
    sources: list[str] = []

    def train(context: Context, call: Any) -> list[Any]:
        rank, size = join()
        step = live.recover(call)
        sources.append(f"{live.source} at {step}")
        while step < 6:
            context.point(f"before {step}")
            optimizer.zero_grad()
            model(torch.full((4, 8), 1.0 + rank + step, device=device())).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            context.point(f"summed {step}")
            with live.commit(step + 1):
                context.point(f"inside {step}")
                optimizer.step()
            step += 1
            context.emit(f"committed {step}")
        live.wait()
        check_equal(live.step, [*model.parameters(), *optimizer.state_dict()["state"][0].values()])
        dist.destroy_process_group()
        return [call.iteration, rank, size, sources]

    everybody = RetryController(min_world_size=context.args["world_size"], wait_for_replacement=40)
    return context.wrap(train, initialize=everybody)()


def check_equal(step: int, tensors: list[torch.Tensor]) -> None:
    """All ranks have the same, bit for bit."""
    for tensor in [torch.tensor([step], device=device()), *tensors]:
        mine = tensor.detach().to(device())
        from_first = mine.clone()
        dist.broadcast(from_first, 0)
        assert torch.equal(from_first, mine)


# --- the same training bit for bit


def run_exact(context: Context) -> Any:
    """Returns [iteration, rank, world size, digest of the state, and of one that was trained without a fault]."""
    torch.use_deterministic_algorithms(True)
    model, halves = halved()
    live = LiveState(model=model, first=halves[0], second=halves[1])

    def train(context: Context, call: Any) -> list[Any]:
        rank, size = join()
        step = live.recover(call)
        learn_exactly(model, halves, step, lambda step: live.commit(step + 1), context.point)
        live.wait()
        found = [digest(model, halves)]
        if context.args["compare"]:  # in the same processes, so that nothing differs but the fault
            other, its_halves = halved()
            learn_exactly(other, its_halves, 0, lambda step: contextlib.nullcontext(), lambda point: None)
            found.append(digest(other, its_halves))
            del other, its_halves
        dist.destroy_process_group()
        return [call.iteration, rank, size, *found]

    everybody = RetryController(min_world_size=context.args["world_size"], wait_for_replacement=40)
    return context.wrap(train, **({"initialize": everybody} if context.args["compare"] else {}))()


def halved() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    """A model, and two optimizers of half its parameters each: between their steps the state is torn."""
    model = network()
    parameters = list(model.parameters())
    return model, [torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in (parameters[:2], parameters[2:])]


def learn_exactly(
    model: torch.nn.Module,
    halves: list[torch.optim.Optimizer],
    first: int,
    commit: Callable[[int], Any],
    point: Callable[[str], None],
) -> None:
    """Steps with DistributedDataParallel and data that depend on nothing but rank and step."""
    parallel = DistributedDataParallel(model)
    for step in range(first, 6):
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        for half in halves:
            half.zero_grad()
        parallel(torch.randn(32, 8, generator=data).to(device())).square().mean().backward()
        point(f"summed {step}")
        with commit(step):
            halves[0].step()
            point(f"between {step}")
            halves[1].step()
    del parallel  # before the group


def digest(model: torch.nn.Module, halves: list[torch.optim.Optimizer]) -> str:
    """Of all bits of parameters and momenta."""
    tensors = [*model.parameters()]
    for half in halves:
        tensors += [half.state[parameter]["momentum_buffer"] for parameter in half.param_groups[0]["params"]]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bytes(tensor.detach().cpu().view(torch.uint8).flatten().tolist()))
    return found.hexdigest()


# --- how long an abort takes


def run_aborts(context: Context) -> Any:
    abort = AbortTorchDistributed(nccl_wake=context.args["wake"])

    def timed(state: Any) -> Any:
        begin = time.monotonic()
        abort(state)
        context.emit("aborted", number=state.iteration, seconds=time.monotonic() - begin)
        return state

    return context.wrap(aborted, abort=timed, max_repeats=None)()


def aborted(context: Context, call: Any) -> list[int]:
    """A rank raises, another one in each iteration, while the others wait on the GPU."""
    rank, size = join()
    check_sum()
    context.emit("reduced")
    if call.iteration < context.args["restarts"]:
        if call.iteration % size == rank:
            time.sleep(0.2)  # long enough for the others to wait in the kernel, which says nothing itself
            context.emit("raises")
            raise ValueError("restart")
        check_sum()
        raise AssertionError("the collective ended without a rank")
    dist.destroy_process_group()
    return [call.iteration, rank, size]


# --- a batch of sends and receives

#: how many batches are begun before their numbers are looked at, and numbers in each: a rank is inside one for most of
#: the time until it hears of the exception
BATCHES, NUMBERS = 1000, 64


def run_exchange(context: Context) -> Any:
    return context.wrap(exchange, max_repeats=None)()


def exchange(context: Context, call: Any) -> list[int]:
    """Two ranks send each other numbers, in batches that are hardly waited for; a rank raises amid them."""
    rank, size = join()
    check_sum()
    goes_on = call.iteration >= context.args["restarts"]
    raises = None if goes_on else (1, 10 + call.iteration, call.iteration % size)
    for turn in range(2):
        received = [torch.full((NUMBERS,), -1, device=device()) for _ in range(BATCHES)]
        for batch in range(BATCHES):
            if (turn, batch, rank) == raises:
                raise ValueError("restart")
            sent = torch.full((NUMBERS,), number_of(call.iteration, rank, turn, batch), device=device())
            pair = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received[batch], 1 - rank)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        for batch, tensor in enumerate(received):
            expected = number_of(call.iteration, 1 - rank, turn, batch)
            assert tensor.eq(expected).all().item(), f"{tensor[0].item()} came instead of {expected}"
        check_sum()
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def number_of(iteration: int, rank: int, turn: int, batch: int) -> int:
    return ((iteration * 2 + rank) * 2 + turn) * BATCHES + batch


# --- many restarts


def run_restarts(context: Context) -> Any:
    return context.wrap(restarts, max_repeats=None)()


def restarts(context: Context, call: Any) -> list[int]:
    """A rank raises, another one in each iteration, with a model, gradients and a batch on the GPU."""
    context.emit("sample", **_sample())
    rank, size = join()
    model = DistributedDataParallel(network())
    batch = torch.ones(1 << 20, device=device())
    learn(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    if call.iteration < context.args["restarts"]:
        if call.iteration % size == rank:
            raise ValueError("restart")
        dist.all_reduce(batch)
        batch.sum().item()
        raise AssertionError("the collective ended without a rank")
    del model
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def _sample() -> dict[str, int]:
    held = {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}
    if device().type == "cuda":
        held |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        free, whole = torch.cuda.mem_get_info()
        held["used"] = whole - free  # by all processes
    return held
