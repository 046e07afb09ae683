"""The command line: torchrun's own parser, with this launcher's options added, and short answers to wrong ones."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch.distributed import run as torchrun
from torch.distributed.argparse_util import env

from inprocess.attribution import one_line
from inprocess.exception import OptionError
from inprocess.launcher import ft_config, wrapped
from inprocess.launcher.decisions import ANY_FAILED, DEFAULT_RESPAWNS, MIN_HEALTHY, Rules
from inprocess.launcher.run_dir import chosen
from inprocess.launcher.warm import ROOM_BYTES
from inprocess.options import Options, did_you_mean
from inprocess.system import slurm
from inprocess.system.environment import LAUNCH
from inprocess.system.listening import listen_address

__all__ = ["options", "parse", "refuse", "rules"]

#: options that SLURM may settle where they were not given; torch's defaults follow
SETTLED = ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr")
#: seconds of grace where torch has no option for it
GRACE = 30
#: torch's own variable for it
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
#: longer is a mistake (seconds)
MAX_INTERVAL_S = 1e6


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Torchrun's options and ours. ``max_restarts`` is None where it was not given, and ``node_rank`` is settled."""
    parser = options()
    if "PET_NODE_RANK" not in os.environ:
        parser.set_defaults(node_rank=None)
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=None)
    defaults = {name: parser.get_default(name) for name in SETTLED}
    for name in SETTLED:  # whether they were given
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        refuse("; ".join(_unknown(name, parser) for name in unknown))
    _check_variables(parsed, parser)
    _settle_slurm(parsed, defaults)
    _check(parsed)
    _settle_node_rank(parsed)
    return parsed


def options() -> argparse.ArgumentParser:
    """Torchrun's own, ours, and those that only nvidia-resiliency-ext's launcher has."""
    parser = torchrun.get_args_parser()
    parser.prog = "inprocess run"
    parser.error = _refused  # type: ignore[method-assign]
    parser.description = (
        "Start the workers of a training job and replace the ones that fail. All of torchrun's options."
    )
    _add(parser)
    ft_config.add_arguments(parser)
    return parser


def refuse(why: object) -> NoReturn:
    """End with exit code 2 and three lines: what is wrong, the form of the command, where its options are."""
    sys.stderr.write(
        f"inprocess run: {one_line(str(why))}\n"
        "usage: inprocess run [OPTION ...] SCRIPT [ITS OPTIONS ...]\n"
        "`inprocess run --help` has the options.\n"
    )
    sys.exit(2)


def _refused(message: str) -> NoReturn:
    """In place of argparse's, which prints all options first."""
    if "training_script" in message:
        message = "no script is named: `inprocess run --nproc-per-node 4 train.py`"
    refuse(re.sub(r"^argument (?:\S*?(--[^/\s]+)\S*|(\S+)):", lambda found: f"{found[1] or found[2]}:", message))


def _unknown(given: str, parser: argparse.ArgumentParser) -> str:
    name = given.partition("=")[0]
    known = {option.replace("_", "-") for option in parser._option_string_actions if option.startswith("--")}
    return f"unknown option {name!r}{did_you_mean(name.replace('_', '-'), sorted(known))}"


def _add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("restarts")
    group.add_argument(
        "--restart-policy",
        "--restart_policy",
        "--ft-restart-policy",
        "--ft-restart_policy",
        dest="restart_policy",
        action=env,
        choices=[MIN_HEALTHY, ANY_FAILED],
        default=MIN_HEALTHY,
        help="min-healthy (default): a wrapped worker that failed is replaced alone and joins the others, which go on; "
        "any-failed: all workers are restarted, as torchrun does.",
    )
    group.add_argument(
        "--wrap",
        action="store_true",
        help="The script is not wrapped: run it, unchanged, as the function that restarts, see `inprocess wrap`.",
    )
    wrapped.add_option(group)
    group.add_argument(
        "--restart-backoff",
        "--restart_backoff",
        action=env,
        type=float,
        default=Rules.backoff,
        metavar="SECONDS",
        help="Pause before the second replacement of a worker; doubles from one to the next. The first comes at once.",
    )
    group.add_argument(
        "--restart-backoff-limit",
        "--restart_backoff_limit",
        action=env,
        type=float,
        default=Rules.backoff_limit,
        metavar="SECONDS",
        help="The pause grows no longer than this.",
    )
    group.add_argument(
        "--warm-workers",
        "--warm_workers",
        action=env,
        type=int,
        default=None,
        metavar="N",
        help="Spare interpreters on this node that have imported what the workers have, and take the place of one that "
        f"failed within a second; 0: none. Default: 1 where {ROOM_BYTES >> 30} GiB of memory are available and a "
        "worker can be replaced alone.",
    )
    group.add_argument(
        "--preload",
        action=env,
        type=_modules,
        default=(),
        metavar="MODULE[,MODULE...]",
        help="Further modules for warm workers to import, such as your own, which they leave to the program otherwise.",
    )
    parser.add_argument(
        "--run-dir",
        "--run_dir",
        action=env,
        type=str,
        default=None,
        metavar="DIR",
        help="Directory for the events of wrapped workers, which `inprocess report DIR` reads; on several nodes best a "
        "shared one. `none`: there is none. Default: that of the variable INPROCESS_RUN_DIR, or a new one below "
        "./inprocess-runs, which the launcher names in its first line.",
    )
    parser.add_argument(
        "--metrics",
        action=env,
        type=str,
        default=None,
        metavar="[HOST:]PORT",
        help="Serve the metrics of the job to Prometheus, from the first node; without HOST on 127.0.0.1. Needs a run "
        'directory, and pip install "inprocess[prometheus]".',
    )
    for action in parser._actions:
        if action.dest == "max_restarts":
            action.help = (
                "How often each worker may be replaced alone, and how often all workers may be restarted, before the "
                f"job fails. Default: {DEFAULT_RESPAWNS} for each worker, 0 for all of them (as torchrun)."
            )
    if not any(action.dest == "shutdown_timeout" for action in parser._actions):  # torch 2.9
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, type=int, default=None)


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise argparse.ArgumentTypeError(f"{name!r} is no name of a module")
    return names


def _check_variables(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """argparse looks at the choices of an option, and not of a default, as which torch takes a variable."""
    for action in parser._actions:
        value = getattr(given, action.dest, None)
        if action.choices is not None and value is not None and value not in action.choices:
            hint = did_you_mean(value, [*action.choices]) or f": pass one of {', '.join(action.choices)}"
            refuse(f"PET_{action.dest.upper()}={value} is unknown{hint}")


def _check(given: argparse.Namespace) -> None:
    if given.warm_workers is not None and given.warm_workers < 0:
        refuse(f"--warm-workers={given.warm_workers}: must be 0 or more")
    for name in ("restart_backoff", "restart_backoff_limit"):
        value = getattr(given, name)
        if not 0 <= value < 1e9:
            refuse(f"--{name.replace('_', '-')}={value:g}: pass a number of seconds, 0 or more")
    if given.max_restarts is not None and given.max_restarts < 0:
        refuse(f"--max-restarts={given.max_restarts}: must be 0 or more")
    if not 0 < given.monitor_interval < MAX_INTERVAL_S:
        refuse(f"--monitor-interval={given.monitor_interval:g}: pass a number of seconds above 0, such as 0.1")
    _check_grace(given)
    if given.metrics is not None:
        _check_metrics(given)
    _check_wrap(given)
    if not _is_range(given.nnodes):
        refuse(f"--nnodes={given.nnodes}: pass a number of nodes, 1 or more, or MIN:MAX")


def _check_grace(given: argparse.Namespace) -> None:
    name, value = "--shutdown-timeout", given.shutdown_timeout
    if value is None and GRACE_VARIABLE in os.environ:
        name, value = GRACE_VARIABLE, os.environ[GRACE_VARIABLE]
    try:
        if value is None or int(value) >= 0:
            return
    except ValueError:
        pass
    refuse(f"{name}={value}: pass a whole number of seconds, 0 or more")


def _check_metrics(given: argparse.Namespace) -> None:
    try:
        listen_address(given.metrics)
    except ValueError as error:
        refuse(f"--metrics={given.metrics}: {error}")
    if chosen(given.run_dir, os.environ) == "":
        refuse(f"--metrics={given.metrics}: it reads a run directory, and there is to be none: pass --run-dir DIR")


def _check_wrap(given: argparse.Namespace) -> None:
    if given.option and not given.wrap:
        refuse(f"--option {given.option[0]}: it is for --wrap; a script that is wrapped gives it to Wrapper()")
    for other in ("no_python", "run_path"):
        if given.wrap and getattr(given, other):
            refuse(f"--wrap runs a Python script or, with -m, a module: leave --{other.replace('_', '-')} out")
    try:
        Options.build(**wrapped.options(given.option))
    except OptionError as error:
        refuse(error)


def _is_range(nnodes: str) -> bool:
    try:
        fewest, most = torchrun.parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError):
        return False
    return bool(0 < fewest <= most)


def _settle_slurm(given: argparse.Namespace, defaults: dict[str, str]) -> None:
    """Under INPROCESS_LAUNCH=slurm the options that were not given come from SLURM, else they have torch's defaults."""
    settled = dict(defaults)
    try:
        if os.environ.get(LAUNCH, "").strip() == "slurm" and not given.standalone:
            settled["nnodes"] = str(slurm.nodes(os.environ)) if given.nnodes is None else given.nnodes
            places = (given.rdzv_backend, given.rdzv_endpoint, given.master_addr, given.master_port)
            if settled["nnodes"] not in ("1", "1:1") and all(place is None for place in places):
                settled |= slurm.rendezvous(os.environ)
                if "is_host" not in given.rdzv_conf:  # whether or not the host knows itself by the name of its node
                    given.rdzv_conf = f"{given.rdzv_conf},is_host={slurm.is_first(os.environ)}".lstrip(",")
    except OptionError as error:
        refuse(error)
    for name, value in settled.items():
        if getattr(given, name) is None:
            setattr(given, name, value)


def _settle_node_rank(given: argparse.Namespace) -> None:
    """A static rendezvous needs it; where it was not given, the infrastructure may know."""
    nodes = torchrun.parse_min_max_nnodes(given.nnodes)[1]
    given.preferred_rank = wanted_rank(os.environ) if given.node_rank is None else given.node_rank
    if given.node_rank is None:
        given.node_rank = max(0, given.preferred_rank) if given.rdzv_backend == "static" and nodes > 1 else 0
    if given.rdzv_backend == "static" and not given.standalone and not 0 <= given.node_rank < nodes:
        refuse(
            f"the node rank is {given.node_rank} (--node-rank, GROUP_RANK or SLURM_PROCID), and "
            f"--nnodes={given.nnodes} has ranks 0 to {nodes - 1}: start one launcher for each node, or pass --node-rank"
        )


def rules(given: argparse.Namespace) -> Rules:
    """The options that decide about restarts."""
    limit: int | None = given.max_restarts
    return Rules(
        policy=given.restart_policy,
        respawns=DEFAULT_RESPAWNS if limit is None else limit,
        restarts=limit or 0,
        backoff=given.restart_backoff,
        backoff_limit=given.restart_backoff_limit,
    )


def wanted_rank(environ: Mapping[str, str]) -> int:
    """The node rank that the infrastructure gave this launcher: GROUP_RANK, or SLURM_PROCID; -1: none."""
    for name in ("GROUP_RANK", "SLURM_PROCID"):
        text = environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return -1
