"""`inprocess run`, also `python -m inprocess.run`: torchrun's command line, and workers that are replaced one by one.

    inprocess run --standalone --nproc-per-node 4 train.py --its-options

See docs/launcher.md. What happens while the workers run is in `launcher.agent`; here it is put together and taken down.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from inprocess import logs
from inprocess.environment import StandardStreams
from inprocess.exception import OptionError
from inprocess.launcher import arguments, ft_config, limits
from inprocess.launcher.agent import GROW_VARIABLE, RESTART_VARIABLE, Agent, JobOver, NodeExcluded, Setup
from inprocess.launcher.control import ControlServer
from inprocess.launcher.decisions import MIN_HEALTHY
from inprocess.launcher.meeting import Meeting
from inprocess.launcher.signals import Signals
from inprocess.logs import get_logger

__all__ = ["main"]

#: where torch has no option for them
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

log = get_logger("inprocess.run")  # also as __main__


def main(given: Sequence[str] | None = None) -> None:
    """Run a job, or one node of it, to its end.

    Raises what torchrun's main raises: ChildFailedError where the job has failed, SignalException for a signal; and
    SystemExit with a message for a wrong option, and where a worker or another node ended the job.
    """
    parsed = arguments.parse(given)
    with contextlib.closing(StandardStreams()), _logging(), _log_directory(parsed):
        record(_run)(parsed)


def _run(given: argparse.Namespace) -> None:
    rules = arguments.rules(given)
    given.max_restarts = rules.restarts  # for torch: how often all workers may be restarted
    try:
        settings = ft_config.load(given)
        _choose_rendezvous(given)
        config, entrypoint, args = torchrun.config_from_args(given)
    except (OptionError, AssertionError, ValueError) as error:
        sys.exit(f"inprocess run: {error}")
    for name in (RESTART_VARIABLE, GROW_VARIABLE):  # of a launcher that is itself a worker
        os.environ.pop(name, None)
    name = _name(entrypoint, args)
    leaves = False
    with contextlib.ExitStack() as stack:
        # closed in the opposite order
        signals = stack.enter_context(Signals(getattr(given, "signals_to_handle", SIGNALS)))
        meeting = signals.interruptible(lambda: _meeting(given, config))
        stack.callback(lambda: meeting.close(shutdown=not leaves))
        spec = _spec(config, entrypoint, args, meeting)
        control = ControlServer(settings)
        stack.callback(control.close)
        setup = Setup(
            rules=rules,
            settings=settings,
            control=control,
            meeting=meeting,
            signals=signals,
            limits=limits.raise_limit(),
            grace=_grace(config),
            start_method=config.start_method,
            prefix_template=config.log_line_prefix_template,
        )
        assert config.logs_specs is not None
        agent = Agent(spec, setup, config.logs_specs)
        try:
            _finish(agent.run(), agent, name, config)
        except (SignalException, NodeExcluded) as error:
            # the others may go on: a rendezvous that is closed takes nobody in any more
            leaves = True
            meeting.say_left()
            events.record(agent.get_event_failed(), config.event_log_handler)
            if isinstance(error, NodeExcluded):
                sys.exit(f"inprocess run: {error}")
            raise
        except JobOver as error:
            events.record(agent.get_event_failed(), config.event_log_handler)
            sys.exit(f"inprocess run: {error}")


def _finish(result: RunResult | None, agent: Agent, name: str, config: LaunchConfig) -> None:
    events.record(agent.get_event_succeeded(), config.event_log_handler)
    log.info("%s", agent.summary())
    if result is not None and result.is_failed():
        raise ChildFailedError(name=name, failures=result.failures)


def _choose_rendezvous(given: argparse.Namespace) -> None:
    """As torchrun does: one node needs no address that somebody chose."""
    alone = given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None
    if given.standalone or (alone and torchrun.parse_min_max_nnodes(given.nnodes)[1] == 1):
        given.rdzv_backend, given.rdzv_endpoint, given.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if given.master_port is None:
        given.master_port = 29500


def _spec(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[str], meeting: Meeting) -> WorkerSpec:
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    # the fields that this version of torch has in both
    shared = {field.name for field in dataclasses.fields(WorkerSpec)} & vars(config).keys()
    return WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=meeting.handler,
        **{name: getattr(config, name) for name in shared},
    )


def _meeting(given: argparse.Namespace, config: LaunchConfig) -> Meeting:
    configs = config.rdzv_configs
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **configs,
    )
    tcp = config.rdzv_backend in ("c10d", "static") and configs.get("store_type", "tcp") == "tcp"
    endpoint = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT) if tcp else None
    return Meeting(
        lambda: get_rendezvous_handler(parameters),
        endpoint=endpoint if endpoint and endpoint[1] else None,
        nodes=(config.min_nodes, config.max_nodes),
        size=config.nproc_per_node,
        local_addr=config.local_addr,
        master_addr=endpoint[0] if endpoint and config.rdzv_backend == "static" else None,
        wish=given.wished_rank,
        join=given.restart_policy == MIN_HEALTHY,
        interval=config.monitor_interval,
        # as torch's rendezvous has them
        join_timeout=float(configs.get("join_timeout", 600)),
        patience=float(configs.get("keep_alive_interval", 5)) * float(configs.get("keep_alive_max_attempt", 3)),
    )


def _grace(config: LaunchConfig) -> float:
    given = getattr(config, "shutdown_timeout", None)  # newer torch only
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", arguments.GRACE) if given is None else given)


def _name(entrypoint: Callable[..., Any] | str, args: list[str]) -> str:
    """What the error report calls the workers: the script, or the program."""
    if entrypoint == sys.executable:
        return next((arg for arg in args if not arg.startswith("-")), sys.executable)
    return entrypoint if isinstance(entrypoint, str) else entrypoint.__name__


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """What the launcher says goes to standard error, from INFO on (LOGLEVEL, as with torchrun).

    Where nobody reads that, neither the launcher nor the parts of torch that it is made of wait for it.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            get_logger(name)
    logger = logging.getLogger("inprocess")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[inprocess run %(asctime)s] %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    try:
        yield
    finally:
        logs.leave()
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def _log_directory(given: argparse.Namespace) -> Iterator[None]:
    """Where torch would make a temporary directory for logs that nobody asked for, it goes again.

    It stays where it holds a worker's error file, which the report names.
    """
    asked = given.log_dir or given.logs_specs or given.redirects != "0" or given.tee != "0"
    if asked:
        yield
        return
    ours = Path(tempfile.mkdtemp(prefix="inprocess_"))
    given.log_dir = str(ours)
    try:
        yield
    finally:
        if not any(ours.rglob("error.json")):
            shutil.rmtree(ours, ignore_errors=True)


if __name__ == "__main__":
    main()
