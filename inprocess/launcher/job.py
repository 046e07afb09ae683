"""One job, or one node of it, from the command line to its end: what `inprocess run` does once torch is imported.

What happens while the workers run is in `agent`; here it is put together and taken down.
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
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from inprocess.exception import OptionError
from inprocess.launcher import arguments, ft_config, script, wrapped
from inprocess.launcher.agent import Agent, JobOver, NodeExcluded, Setup
from inprocess.launcher.control import ControlServer
from inprocess.launcher.decisions import MIN_HEALTHY, Rules
from inprocess.launcher.meeting import LEAST_PATIENCE_S, NodeRendezvous, why_not_met
from inprocess.launcher.metrics import MetricsProgram
from inprocess.launcher.run_dir import RunDirectory, chosen
from inprocess.launcher.signals import Signals
from inprocess.launcher.warm import WarmWorkers
from inprocess.launcher.workers import GROW_VARIABLE, RESTART_VARIABLE
from inprocess.options import did_you_mean
from inprocess.stores.addresses import lookup
from inprocess.system import descriptors, logs, private_folder
from inprocess.system.environment import StandardStreams
from inprocess.system.inherited import children_are_waited_for
from inprocess.system.logs import get_logger

__all__ = ["run"]

#: where torch has no option for them
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

log = get_logger("inprocess.run")


def run(given: Sequence[str] | None = None) -> None:
    """See `inprocess.run.main`."""
    parsed = arguments.parse(given)
    with contextlib.closing(StandardStreams()), _logging(), _log_directory(parsed):
        record(_run)(parsed)


def _run(given: argparse.Namespace) -> None:
    rules = arguments.rules(given)
    given.max_restarts = rules.restarts  # for torch: how often all workers may be restarted
    try:
        settings = ft_config.load(given)
        _choose_rendezvous(given)
        _check_backend(given)
        _choose_threads(given)
        _make_log_directory(given.log_dir)
        script.check(given)
        _wrap(given)
        config, entrypoint, args = torchrun.config_from_args(given)
        _check_event_log_handler(given)
    except (OptionError, AssertionError, ValueError) as error:
        arguments.refuse(error)
    for name in (RESTART_VARIABLE, GROW_VARIABLE):  # of a launcher that is itself a worker
        os.environ.pop(name, None)
    run_dir = RunDirectory(chosen(given.run_dir, os.environ), given.run_name)
    name = _name(entrypoint, args)
    leaves = False
    with contextlib.ExitStack() as stack:
        # closed in the opposite order
        stack.enter_context(children_are_waited_for())
        signals = stack.enter_context(Signals(getattr(given, "signals_to_handle", SIGNALS)))
        meeting = signals.interruptible(lambda: _meet(given, config))
        stack.callback(lambda: meeting.close(shutdown=not leaves))
        spec = _spec(config, entrypoint, args, meeting)
        number = _warm_workers(given.warm_workers, rules, config)
        control = ControlServer(settings, learns=number != 0)
        stack.callback(control.close)
        limits = descriptors.raise_limit()
        warm = WarmWorkers(number, given.preload, limits)
        stack.callback(warm.close)
        metrics = MetricsProgram(given.metrics)
        stack.callback(metrics.close)
        stack.callback(run_dir.close)
        setup = Setup(
            rules=rules,
            settings=settings,
            control=control,
            meeting=meeting,
            run_dir=run_dir,
            signals=signals,
            metrics=metrics,
            warm=warm,
            limits=limits,
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
        except OptionError as error:  # an address that is not of this machine
            events.record(agent.get_event_failed(), config.event_log_handler)
            arguments.refuse(error)


def _finish(result: RunResult | None, agent: Agent, name: str, config: LaunchConfig) -> None:
    events.record(agent.get_event_succeeded(), config.event_log_handler)
    log.info("%s", agent.summary())
    if result is not None and result.is_failed():
        raise ChildFailedError(name=name, failures=result.failures)


def _choose_rendezvous(given: argparse.Namespace) -> None:
    """As torchrun does: one node needs no address that somebody chose."""
    given.run_name = "" if given.rdzv_id == "none" else str(given.rdzv_id)  # "none" is torch's default
    alone = given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None
    if given.standalone or (alone and torchrun.parse_min_max_nnodes(given.nnodes)[1] == 1):
        given.rdzv_backend, given.rdzv_endpoint, given.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if given.master_port is None:
        given.master_port = 29500


def _check_backend(given: argparse.Namespace) -> None:
    backend, known = given.rdzv_backend, sorted(getattr(rendezvous_handler_registry, "_registry", ()))
    if known and backend not in known:
        hint = did_you_mean(backend, known) or f": pass one of {', '.join(known)}"
        raise OptionError(f"--rdzv-backend={backend} is unknown{hint}")


def _choose_threads(given: argparse.Namespace) -> None:
    """As torchrun does, without its banner: OMP_NUM_THREADS=1 for several workers, where it is not set."""
    try:
        size = torchrun.determine_local_world_size(given.nproc_per_node)
    except ValueError as error:
        raise OptionError(f"--nproc-per-node={given.nproc_per_node}: {error}") from None
    if size < 1:
        raise OptionError(f"--nproc-per-node={given.nproc_per_node}: must be 1 or more")
    given.nproc_per_node = str(size)
    if size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _check_event_log_handler(given: argparse.Namespace) -> None:
    try:
        get_logging_handler(given.event_log_handler)
    except KeyError:
        raise OptionError(
            f"--event-log-handler={given.event_log_handler} is not registered with torch: pass null or console"
        ) from None


def _wrap(given: argparse.Namespace) -> None:
    if given.wrap:
        words = wrapped.command(given.training_script, given.training_script_args, given.module, given.option)
        given.module, (given.training_script, *given.training_script_args) = True, words


def _spec(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[str], meeting: NodeRendezvous
) -> WorkerSpec:
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


def _meet(given: argparse.Namespace, config: LaunchConfig) -> NodeRendezvous:
    """The rendezvous, or an end without a traceback. May take as long as its store does to answer."""
    backend, endpoint = config.rdzv_backend, config.rdzv_endpoint
    _refuse_unknown(config.local_addr)
    try:
        return _meeting(given, config)
    except (ValueError, ImportError) as error:  # wrong options; a backend that needs another package
        arguments.refuse(f"the rendezvous (--rdzv-backend={backend}, --rdzv-endpoint={endpoint}): {error}")
    except RendezvousError as error:
        what = f"the rendezvous failed (--rdzv-backend={backend}, --rdzv-endpoint={endpoint})"
        sys.exit(f"inprocess run: {what}: {why_not_met(error)}")


def _meeting(given: argparse.Namespace, config: LaunchConfig) -> NodeRendezvous:
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
    # as torch's rendezvous has them
    patience = float(configs.get("keep_alive_interval", 5)) * float(configs.get("keep_alive_max_attempt", 3))
    if config.max_nodes > 1 and not patience >= LEAST_PATIENCE_S:
        raise ValueError(
            f"--rdzv-conf: keep_alive_interval * keep_alive_max_attempt is {patience:g} s, and a node that is silent "
            f"for so long counts as lost: choose them so that it is {LEAST_PATIENCE_S:g} s or more"
        )
    tcp = config.rdzv_backend in ("c10d", "static") and configs.get("store_type", "tcp") == "tcp"
    endpoint = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT) if tcp else None
    if endpoint and endpoint[1]:
        _look_up(*endpoint)
    return NodeRendezvous(
        lambda: get_rendezvous_handler(parameters),
        endpoint=endpoint if endpoint and endpoint[1] else None,
        towards=endpoint[0] if endpoint else config.rdzv_endpoint.partition(":")[0],
        nodes=(config.min_nodes, config.max_nodes),
        size=config.nproc_per_node,
        local_addr=config.local_addr,
        master_addr=endpoint[0] if endpoint and config.rdzv_backend == "static" else None,
        preferred_rank=given.preferred_rank,
        join=given.restart_policy == MIN_HEALTHY,
        interval=config.monitor_interval,
        join_timeout=float(configs.get("join_timeout", 600)),
        patience=patience,
    )


def _refuse_unknown(local_addr: str | None) -> None:
    """The name of this node for the others has to be known here, too: a store is served under it."""
    try:
        if local_addr:
            lookup(local_addr, 0)
    except OSError as error:
        arguments.refuse(
            f"--local-addr={local_addr}: does not resolve on this node ({error.strerror}). Pass the address of the "
            "interface by which the other nodes reach this one, or leave it out"
        )


def _look_up(host: str, port: int) -> None:
    """Say so where a name is unknown: torch tries again for a long time, and does not say so by default."""
    try:
        lookup(host, port)
    except OSError as error:
        log.warning(
            "the host of the rendezvous, %s, is unknown (%s); trying again until its timeout. Pass a name or address "
            "that every node can resolve as --rdzv-endpoint (static: --master-addr)",
            host,
            error.strerror,
        )


def _warm_workers(given: int | None, rules: Rules, config: LaunchConfig) -> int | None:
    """How many: as given; else one as memory allows (None), but none where no worker is ever replaced alone."""
    if given is not None:
        return given
    alone = config.max_nodes * config.nproc_per_node == 1  # nobody is left whom a replacement could join
    return 0 if alone or rules.policy != MIN_HEALTHY or not rules.respawns else None


def _grace(config: LaunchConfig) -> float:
    given = getattr(config, "shutdown_timeout", None)  # newer torch only
    return float(os.environ.get(arguments.GRACE_VARIABLE, arguments.GRACE) if given is None else given)


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


def _make_log_directory(path: str | None) -> None:
    """torch would make it, and those above, with whatever mode the umask leaves, and follow anybody's link."""
    if path and path != os.devnull:
        try:
            private_folder.own(path).close()
        except OSError as error:
            raise OptionError(f"--log-dir={path} cannot be made or opened: {error}") from None


@contextlib.contextmanager
def _log_directory(given: argparse.Namespace) -> Iterator[None]:
    """Where torch would make a temporary directory for logs that nobody asked for, it goes again.

    It stays where the job has failed and it holds a worker's error file: the report names it.
    """
    asked = given.log_dir or given.logs_specs or given.redirects != "0" or given.tee != "0"
    if asked:
        yield
        return
    ours = Path(tempfile.mkdtemp(prefix="inprocess_"))
    given.log_dir = str(ours)
    is_named = False
    try:
        yield
    except ChildFailedError:
        is_named = any(ours.rglob("error.json"))
        raise
    finally:
        if not is_named:
            shutil.rmtree(ours, ignore_errors=True)
