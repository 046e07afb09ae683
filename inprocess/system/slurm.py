"""What SLURM says of a process, in the variables that torch and this library read. Pure: a mapping in, a mapping out.

RANK              SLURM_PROCID
WORLD_SIZE        SLURM_STEP_NUM_TASKS, else SLURM_NTASKS
LOCAL_RANK        SLURM_LOCALID
LOCAL_WORLD_SIZE  the entry of this node, SLURM_NODEID, in SLURM_STEP_TASKS_PER_NODE, else SLURM_TASKS_PER_NODE
MASTER_ADDR       the first host of SLURM_STEP_NODELIST, else SLURM_JOB_NODELIST
MASTER_PORT       see `port`
INPROCESS_JOB     see `name`
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping

from inprocess.exception import OptionError

__all__ = ["first_host", "hosts", "is_first", "name", "nodes", "port", "rendezvous", "tasks_per_node", "variables"]

#: ports of jobs: below those that Linux gives to outgoing connections (32768 and up)
FIRST_PORT, PORTS = 20000, 10000
#: between the ports of two steps of one job: far from the ports of the jobs that were submitted next
STEP = 1000
_REMEDY = "Start the program with srun, or unset INPROCESS_LAUNCH and set RANK, WORLD_SIZE and the others yourself."
#: numbers in a list of hosts: 1, 07, 1-3, 007-120
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
#: no cluster has more hosts: a larger list is a mistake, and would fill the memory
MOST_HOSTS = 1_000_000


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What follows from SLURM's variables for those of RANK ... MASTER_PORT that are not set.

    Raises OptionError that names SLURM's variable, its value and the remedy.
    """
    size = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size > 1 and not environ.get("SLURM_STEP_ID", "").strip():
        raise OptionError(
            f"INPROCESS_LAUNCH=slurm: SLURM_STEP_ID is not set, so srun did not start this process, and it would wait "
            f"for {size - 1} others that nobody starts. {_REMEDY}"
        )
    rules: dict[str, Callable[[], object]] = {
        "RANK": lambda: _number(environ, "SLURM_PROCID"),
        "WORLD_SIZE": lambda: size,
        "LOCAL_RANK": lambda: _number(environ, "SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": lambda: _local_size(environ),
        "MASTER_ADDR": lambda: first_host(environ),
        "MASTER_PORT": lambda: port(environ),
        "INPROCESS_JOB": lambda: name(environ),
    }
    return {name: str(rule()) for name, rule in rules.items() if not environ.get(name, "").strip()}


def first_host(environ: Mapping[str, str]) -> str:
    """The host of task 0, unless tasks were given to hosts by hand (``srun --distribution=arbitrary``)."""
    name, text = _text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    try:
        return next(hosts(text))
    except ValueError as error:
        raise OptionError(
            f"INPROCESS_LAUNCH=slurm: {name}={text!r} is no list of hosts: {error}. Set MASTER_ADDR yourself to the "
            "host of task 0"
        ) from None


def port(environ: Mapping[str, str]) -> int:
    """The same on all ranks of a step, and another one for jobs and steps that may share a host with it."""
    job, step = _number(environ, "SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", "").strip()
    return FIRST_PORT + (job + STEP * (_number(environ, "SLURM_STEP_ID") if step else 0)) % PORTS


def name(environ: Mapping[str, str]) -> str:
    """Of a step: another one for each step, and for each start of a job, which keeps its number when it is requeued."""
    job = f"slurm-{_number(environ, 'SLURM_JOB_ID')}"
    more = (environ.get(name, "").strip() for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return "-".join([job, *filter(None, more)])


def rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """Where the launchers of a step meet, as options of torchrun, and under which name."""
    where = f"{first_host(environ)}:{port(environ)}"
    return {"rdzv_backend": "c10d", "rdzv_endpoint": where, "rdzv_id": name(environ)}


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this is the host that `first_host` names."""
    return _number(environ, "SLURM_NODEID") == 0


def nodes(environ: Mapping[str, str]) -> int:
    """How many nodes the step has, each with one task: a launcher of the node's workers. Raises OptionError."""
    count = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks != count:
        raise OptionError(
            f"INPROCESS_LAUNCH=slurm: the step has {tasks} tasks on {count} nodes (SLURM_STEP_NUM_TASKS, "
            "SLURM_STEP_NUM_NODES), and a node needs one launcher: srun --ntasks-per-node=1 inprocess run ..., or pass "
            "--nnodes"
        )
    return count


def hosts(text: str) -> Iterator[str]:
    """The hosts of a list such as ``a[1-3,07],b``, in its order. Raises ValueError where it is wrong."""
    count = 0
    for entry in _entries(text):
        pieces = [_piece(piece) for piece in re.split(r"(\[[^\[\]]*\])", entry)]
        for parts in itertools.product(*pieces):
            count += 1
            if count > MOST_HOSTS:
                raise ValueError(f"it has more than {MOST_HOSTS} hosts")
            yield "".join(parts)


def _entries(text: str) -> list[str]:
    """Between the commas that are not in brackets."""
    entries = re.split(r",(?![^\[]*\])", text.strip())
    if not all(entries):
        raise ValueError("an entry is empty")
    return entries


def _piece(text: str) -> list[str]:
    """A name, or what brackets stand for."""
    if not text.startswith("["):
        if re.search(r"[\[\]\s]", text):
            raise ValueError(f"{text!r} has a bracket without its other half, or a space")
        return [text]
    return [number for part in text[1:-1].split(",") for number in _numbers(part)]


def _numbers(text: str) -> list[str]:
    """``07-11`` is 07, 08, 09, 10, 11: the first number says how many digits there are at least."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} in brackets is no number and no range of numbers")
    first, last = match[1], match[2] or match[1]
    low, high = int(first), int(last)
    if not low <= high < low + MOST_HOSTS:
        raise ValueError(f"the range {text!r} has no hosts, or too many")
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node, from a text such as ``2(x3),1``. Raises ValueError."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no number of tasks such as 2 or 2(x3)")
        times = int(match[2] or 1)
        if times > MOST_HOSTS:
            raise ValueError(f"{part!r} has too many nodes")
        counts += [int(match[1])] * times
    return counts


def _local_size(environ: Mapping[str, str]) -> int:
    name, text = _text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = _number(environ, "SLURM_NODEID")
    try:
        counts = tasks_per_node(text)
    except ValueError as error:
        raise OptionError(f"INPROCESS_LAUNCH=slurm: {name}={text!r}: {error}. Set LOCAL_WORLD_SIZE yourself") from None
    if node >= len(counts):
        raise OptionError(
            f"INPROCESS_LAUNCH=slurm: SLURM_NODEID={node}, and {name}={text!r} has {len(counts)} nodes. Set "
            "LOCAL_WORLD_SIZE yourself"
        )
    return counts[node]


def _text(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """The first of these that is set, with its value."""
    for name in names:
        if value := environ.get(name, "").strip():
            return name, value
    raise OptionError(f"INPROCESS_LAUNCH=slurm, and {' or '.join(names)} is not set. {_REMEDY}")


def _number(environ: Mapping[str, str], *names: str) -> int:
    name, text = _text(environ, *names)
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise OptionError(f"INPROCESS_LAUNCH=slurm: {name}={text!r} is no number from 0 on. {_REMEDY}")
    return int(text)
