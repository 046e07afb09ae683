"""What a reserve does while it waits: it warms up, costs the others nothing, and is there at once when it is needed."""

from __future__ import annotations

import re
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess
from tests.harness import At, Kill, Raise
from tests.harness.child import Context
from tests.harness.launch import KILLING

from . import checks, targets

SPARE = 2


def _options(context: Context, **more: Any) -> dict[str, Any]:
    def warm_up(state: Any) -> None:
        context.emit("warm_up", iteration=state.iteration, size=state.active_world_size)
        WAYS[context.args["way"]](context, state)
        context.emit("warm", iteration=state.iteration)

    return targets.two_active(context) | {"warm_up": warm_up} | more


def _hasty(context: Context) -> dict[str, Any]:
    return _options(context, **KILLING)


def _returns(context: Context, state: Any) -> None:
    pass


def _raises(context: Context, state: Any) -> None:
    raise ValueError("no room on this GPU")


def _loops(context: Context, state: Any) -> None:
    while True:
        time.sleep(0.001)


def _blocks(context: Context, state: Any) -> None:
    time.sleep(1000)


def _trains(context: Context, state: Any) -> None:
    """A step as the function does it, in a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    if context.args.get("stays"):
        context.emit("in group")
        _loops(context, state)
    del model
    dist.destroy_process_group()


def _compiles(context: Context, state: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert _compiled(torch.ones(1)).item() == 1
    dist.destroy_process_group()


@torch.compile(backend="eager")
def _compiled(number: torch.Tensor) -> torch.Tensor:
    return number * dist.get_world_size() + 10 * dist.get_rank()


def _doubles(context: Context, state: Any) -> None:
    _doubled(torch.ones(1))


def _count(graph: torch.fx.GraphModule, _: object) -> Any:
    """A compiler."""
    COMPILED.append(graph)
    return graph.forward


@torch.compile(backend=_count)
def _doubled(number: torch.Tensor) -> torch.Tensor:
    return 2 * number


COMPILED: list[torch.fx.GraphModule] = []
WAYS = {each.__name__.strip("_"): each for each in (_returns, _raises, _loops, _blocks, _trains, _compiles, _doubles)}


def _over_fake(context: Context) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts its own there
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
    return "it works"


def _run(context: Context) -> Any:
    return context.wrap(_train)()


def _train(context: Context, call: Any) -> list[int]:
    """The ranks go on when the test's spare is where the test wants it."""
    if call.iteration == 0 and "until" in context.args:
        context.wait_for(targets.When(context.args["until"], 1))
    if "flag" in context.args:
        targets.wait_for_flag(context.args["flag"])
    return targets.train(context, call)


def _run_compiled(context: Context) -> Any:
    return context.wrap(_multiply)()


def _multiply(context: Context, call: Any) -> float:
    _train(context, call)
    dist.init_process_group("gloo")
    value = _compiled(torch.ones(1)).item()
    dist.destroy_process_group()
    return value


def _run_doubled(context: Context) -> Any:
    if context.args["keeps"]:
        inprocess.keep_compiled_code()
    return context.wrap(_double)()


def _double(context: Context, call: Any) -> int:
    _doubled(torch.ones(1))
    _train(context, call)
    return len(COMPILED)


def _warmed(ranks: Any) -> list[int]:
    return [event["iteration"] for event in ranks[SPARE].of("warm_up")]


@pytest.mark.parametrize("way", ["returns", "trains"])
def test_a_spare_warms_up_and_takes_over(launch, way):
    faults = {At(1, step=1): Kill()}
    ranks = launch(_run, 3, faults=faults, wrapper=_options, args={"way": way, "until": "warm"}).wait()
    checks.died(ranks, {1: -signal.SIGKILL})
    assert [ranks[rank].value for rank in (0, SPARE)] == [[1, 0, 2], [1, 1, 2]]
    assert _warmed(ranks) == [0] and ranks[SPARE].of("warm_up")[0]["size"] == 2
    assert re.search(r"a reserve, has warmed up in \d+\.\d s", ranks[SPARE].log)


def test_code_that_it_has_compiled_is_compiled_again(launch):
    """torch 2.13 takes rank and world size for constants: the spare's were those of its own group."""
    args = {"way": "compiles", "until": "warm"}
    ranks = launch(_run_compiled, 3, faults={At(1, step=1): Kill()}, wrapper=_options, args=args).wait()
    assert [ranks[rank].value for rank in (0, SPARE)] == [2.0, 12.0]


@pytest.mark.parametrize(("keeps", "count"), [(True, 1), (False, 2)])
def test_code_that_it_has_compiled_stays_where_the_program_says_so(launch, keeps, count):
    args = {"way": "doubles", "until": "warm", "keeps": keeps}
    ranks = launch(_run_doubled, 3, faults={At(1, step=1): Kill()}, wrapper=_options, args=args).wait()
    assert [ranks[rank].value for rank in (0, SPARE)] == [1, count]


def test_a_backward_pass_over_torch_s_fake_backend_fails(launch):
    """torch 2.13: its works have no tensors, so the guide warms up in a group of one. Where it works, say so there."""
    assert "expected the hook result is either a Tensor or a TensorList" in launch(_over_fake, 1).wait()[0].value


def test_it_warms_up_again_after_a_restart_in_which_it_is_not_needed(launch):
    ranks = launch(_run, 3, faults={At(1, step=1): Raise()}, wrapper=_options, args={"way": "returns"}).wait()
    assert ranks.values == [[1, 0, 2], [1, 1, 2], None]
    assert _warmed(ranks) == [0, 1]


@pytest.mark.parametrize(
    "args", [{"way": "loops", "until": "warm_up"}, {"way": "trains", "stays": 1, "until": "in group"}]
)
def test_a_restart_ends_it(launch, args):
    """And the spare is in the function with the others."""
    ranks = launch(_run, 3, faults={At(0, step=1): Kill()}, wrapper=_options, args=args).wait()
    checks.died(ranks, {0: -signal.SIGKILL})
    assert [ranks[rank].value for rank in (1, SPARE)] == [[1, 0, 2], [1, 1, 2]]
    assert not ranks[SPARE].of("warm")


def test_what_it_raises_takes_out_the_spare_alone(launch):
    ranks = launch(_run, 3, wrapper=_options, args={"way": "raises"}).wait()
    checks.failed(ranks, {SPARE: "ValueError"})
    assert [rank.value for rank in ranks[:2]] == [[0, 0, 2], [0, 1, 2]]


def test_a_spare_that_hangs_is_killed_and_nobody_restarts(launch, tmp_path):
    flag = tmp_path / "go on"
    run = launch(_run, 3, wrapper=_hasty, args={"way": "blocks", "flag": str(flag)})
    run.wait_event("ended", deadline=30.0)
    flag.touch()
    ranks = run.wait()
    checks.died(ranks, {SPARE: -signal.SIGKILL})
    assert [rank.value for rank in ranks[:2]] == [[0, 0, 2], [0, 1, 2]]
