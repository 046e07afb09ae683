"""What ``Wrapper`` makes of a function, without a job: written with parentheses and without, enabled and not."""

from __future__ import annotations

import copy
import inspect
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import inprocess
from inprocess.exception import OptionError, RestartError

README = Path(__file__).parents[2] / "README.md"


def train(config: int, call: inprocess.CallWrapper = None) -> Any:
    return config, call, inprocess.current_call()


# --- without parentheses -------------------------------------------------------------------------------------------


@pytest.fixture
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_without_parentheses(outside_a_job: None) -> None:
    @inprocess.Wrapper
    def mine(x: int) -> int:
        """Mine."""
        return x

    assert inspect.isfunction(mine) and (mine.__name__, mine.__doc__) == ("mine", "Mine.")
    for fn in (mine, inprocess.Wrapper()(train)):  # both need a job
        with pytest.raises(OptionError, match="WORLD_SIZE"):
            fn(1)


async def later() -> None: ...


def steps() -> Any:
    yield


async def later_steps() -> Any:
    yield


class Later:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("fn", "kind"),
    [(later, "a coroutine"), (steps, "a generator"), (later_steps, "an asynchronous generator"), (Later(), "a corou")],
)
def test_functions_whose_body_runs_later(fn: Any, kind: str) -> None:
    with pytest.raises(OptionError, match=f"is {kind}.* nothing restarts it"):
        inprocess.Wrapper()(fn)
    assert inprocess.Wrapper(enabled=False)(fn) is fn


@pytest.mark.parametrize("name", ["call", "call_wrapper"])
def test_a_parameter_without_an_annotation(name: str) -> None:
    space: dict[str, Any] = {"CallWrapper": inprocess.CallWrapper}
    exec(f"def bare({name}=None): ...\ndef given({name}: object = None): ...\ndef other({name}, x): ...\n", space)
    exec(f"def asks({name}: CallWrapper = None): ...", space)
    with pytest.warns(UserWarning, match=f"the parameter '{name}' of <function bare.* write `{name}: inprocess"):
        inprocess.Wrapper()(space["bare"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fn in (space["given"], space["other"], space["asks"], len):
            inprocess.Wrapper()(fn)


def test_a_method_without_parentheses(outside_a_job: None) -> None:
    class Trainer:
        @inprocess.Wrapper
        def run(self) -> None: ...

    assert inspect.ismethod(Trainer().run)


def test_options_beside_the_function() -> None:
    assert inprocess.Wrapper(len, enabled=False) is len
    with pytest.raises(OptionError, match="soft_timeout=-1"):
        inprocess.Wrapper(len, soft_timeout=-1)


@pytest.mark.parametrize("values", [(3,), (None,), ({"soft_timeout": 3},), (len, len), (None, len)])
def test_options_are_given_by_name(values: tuple[Any, ...]) -> None:
    with pytest.raises(OptionError, match=r"Wrapper\(.*options are given by name, as in Wrapper\(soft_timeout=60\)"):
        inprocess.Wrapper(*values)


def test_with_options_it_is_a_wrapper() -> None:
    wrapper = inprocess.Wrapper(soft_timeout=30)
    assert type(wrapper) is type(copy.copy(wrapper)) is inprocess.Wrapper
    with pytest.raises(OptionError, match="decorates a function, not 3"):
        wrapper(3)  # type: ignore[type-var]


def test_subclasses() -> None:
    class Quiet(inprocess.Wrapper):
        pass

    class Mine(inprocess.Wrapper):
        def __init__(self, fn: Callable[..., Any], seconds: float) -> None:
            super().__init__(soft_timeout=seconds, enabled=False)
            self.fn = self(fn)

    assert isinstance(Quiet(), Quiet) and inspect.isfunction(Quiet(train))
    assert Mine(len, 30).fn is len


def test_the_class_shows_its_options() -> None:
    parameters = inspect.signature(inprocess.Wrapper).parameters
    assert parameters["soft_timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(inprocess.Wrapper.__init__).parameters) == ["self", *parameters]


# --- disabled ------------------------------------------------------------------------------------------------------


disabled = inprocess.Wrapper(enabled=False)


def test_a_function_without_the_parameter_is_returned_itself() -> None:
    def optional(call: inprocess.CallWrapper | None = None) -> Any:
        return call

    def by_name(inprocess_call_wrapper: Any = None) -> Any:
        return inprocess_call_wrapper

    for fn in (len, optional, by_name):
        assert disabled(fn) is fn
    assert optional() is by_name() is None


def run_disabled() -> Any:
    config, call, current = disabled(train)(7)
    assert config == 7 and isinstance(call, inprocess.CallWrapper) and current is call
    assert inprocess.current_call() is None
    with call.atomic(), call.section("save"):
        call.ping()
    with pytest.raises(RestartError, match="init_process_group"):
        _ = call.store
    return call.state


def test_before_torch_distributed_is_initialized(outside_a_job: None) -> None:
    assert (run_disabled().rank, run_disabled().world_size) == (0, 1)


def test_after_torch_distributed_is_initialized(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows better than the environment, which a program need not have used."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    state = run_disabled()
    assert (state.rank, state.world_size) == (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_outside_the_main_thread(outside_a_job: None) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run_disabled()))
    thread.start()
    thread.join()
    assert found


def test_the_function_of_the_readme(outside_a_job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"## Your own function\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    source = source.replace("@inprocess.Wrapper()", "@inprocess.Wrapper(enabled=False)")
    assert "enabled=False" in source
    saved, groups = [], []
    monkeypatch.setattr(dist, "init_process_group", groups.append)
    names: dict[str, Any] = {
        "load_latest_checkpoint": lambda config: 1,
        "train_one": lambda config, step: step + 1,
        "save_checkpoint": saved.append,
    }
    exec(source, names)
    names["train"](SimpleNamespace(steps=4))
    assert (groups, saved) == (["nccl"], [2, 3, 4])
