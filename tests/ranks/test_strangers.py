"""Strangers of every kind at every server of a running job: they delay neither a recovery nor the end of a call."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from inprocess import LiveState
from inprocess.failover import arbiter_client
from inprocess.live import http as live_http
from inprocess.system.clock import monotonic
from tests.harness import At, Raise, strangers
from tests.harness.child import Context
from tests.harness.endpoint import get, serving
from tests.harness.launch import PATIENT

from . import learning

#: how much longer anything may take (seconds)
DELAY_S = 1.0


def run_among_strangers(context: Context) -> Any:
    """`learning.run_replicated`; returns the longest recovery and how long the end took, in seconds, and who came."""
    recoveries: list[float] = []
    ended: list[float] = []
    at: list[str] = []
    recover, wait = LiveState.recover, LiveState.wait

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def surround(what: str, where: tuple[str, int]) -> None:
            if context.args["come"]:
                at.append(what)
                for _ in range(3):
                    strangers.surround(stack, where)

        class Served(live_http._Served):
            def __enter__(self) -> Any:
                super().__enter__()
                surround("state", (self.host, self.port))
                return self

        def recovers(self: LiveState, call: Any) -> int:
            for contact in [each for clients in arbiter_client._open for each in clients._everybody()]:
                surround("arbiter", (contact.host, contact.port))
            begin = monotonic()
            step = recover(self, call)
            recoveries.append(monotonic() - begin)
            return step

        def waits(self: LiveState) -> None:
            wait(self)
            ended.append(monotonic())

        patch.setattr(live_http, "_Served", Served)
        patch.setattr(LiveState, "recover", recovers)
        patch.setattr(LiveState, "wait", waits)
        step, *_ = learning.run_replicated(context)
        return [step, max(recoveries), monotonic() - ended[-1], at]


def test_they_delay_nobody(launch: Any, tmp_path: Path) -> None:
    """The arbiters' only thread gave each of them a second, and 60 of them delayed the end by 46 s, before."""
    took = []
    for come in (False, True):
        run_dir = tmp_path / str(come)
        run_dir.mkdir()
        args = {"come": come, "live": {"transport": "http"}}
        with serving(run_dir) as where, contextlib.ExitStack() as stack:
            if come:
                strangers.surround(stack, ("127.0.0.1", int(where.rpartition(":")[2])))
            wrapper = PATIENT | {"run_dir": str(run_dir)}
            faults = {At(1, step="inside 3"): Raise()}
            ranks = launch(run_among_strangers, 3, args=args, wrapper=wrapper, faults=faults).wait()
            assert "inprocess_build_info" in get(f"{where}/metrics")
        assert [rank.value[0] for rank in ranks] == [6, 6, 6]
        met = [what for rank in ranks for what in rank.value[3]]
        assert ("state" in met, met.count("arbiter") >= 3) == (come, come)
        took.append([max(rank.value[place] for rank in ranks) for place in (1, 2)])
    calm, crowded = took
    assert [now < before + DELAY_S for before, now in zip(calm, crowded, strict=True)] == [True, True], took
