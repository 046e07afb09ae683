"""Jobs that are started with RANK and WORLD_SIZE alone: where the store is stands in the options."""

from __future__ import annotations

from datetime import timedelta

import pytest

from inprocess.store import FileStore
from inprocess.testing.ports import ReservedPort
from tests.harness import At, Raise
from tests.harness.launch import PATIENT

from . import checks, targets

#: the rest of the environment is put back in the end, as after every run of the harness: these stay unset
UNSET = {"MASTER_ADDR": None, "MASTER_PORT": None}


@pytest.mark.parametrize("host", [{}, {"host_name": "localhost"}])
def test_a_port_in_store_kwargs(launch, host):
    with ReservedPort() as port:
        kwargs = {"port": port.number, "timeout": timedelta(seconds=30)} | host
        wrapper = PATIENT | {"store_kwargs": kwargs}
        ranks = launch(targets.run_train, 2, faults={At(1, step=1): Raise()}, wrapper=wrapper, env=UNSET).wait()
    checks.went_on(ranks)


def test_a_store_that_needs_no_port(launch, tmp_path):
    wrapper = PATIENT | {"store_factory": FileStore, "store_kwargs": {"file_name": str(tmp_path / "store")}}
    ranks = launch(targets.run_train, 2, faults={At(0, step=1): Raise()}, wrapper=wrapper, env=UNSET).wait()
    checks.went_on(ranks)
