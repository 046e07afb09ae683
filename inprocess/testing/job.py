"""A program on several ranks, for one test: checks what it is asked for, runs it, and says what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import os
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inprocess.exception import ENDS, OptionError, asks_for_end
from inprocess.options import HOOKS, Options, did_you_mean
from inprocess.protocol.phases import RAISING, Phase
from inprocess.testing.coordinates import PHASES, At
from inprocess.testing.faults import Fault, NetworkCut, Raise

from .network import Network
from .outcome import Deadline, RankResult
from .process import check_variables, run_script
from .rank import Context
from .result import Result
from .run import Run

__all__ = ["Job", "repeats_with"]

OPTIONS = tuple(each.name for each in dataclasses.fields(Options))
#: what differs in the same error of two ranks
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: `max_repeats` where neither the program nor the test gives it: one that fails in every iteration is to end soon
REPEATS = 3
#: how long a run may take (seconds)
DEADLINE = 60.0


def repeats_with(faults: Mapping[At, Fault]) -> int:
    """`max_repeats` that lets so many faults strike."""
    return max(REPEATS, len(faults) + 2)


class Job:
    """Ranks that run a program: ``Job(4).run(train, 20)``. Usable for several runs, one after the other.

    Args:
        world_size: number of ranks, all on this host: processes that fork from a server which has imported torch.
        options: of ``inprocess.Wrapper``, in place of what the program says: ``{"soft_timeout": 2}``, so that a hang is
            noticed soon. In tests ``max_repeats`` is 3, or more with many faults, where neither gives it.
        env: variables of the ranks besides this process's; ``{rank}`` is filled in, None removes one.
        deadline: seconds. At the end of it every rank shows its stacks and is killed, and the test fails.
        respawn: so many ranks that die are replaced, as a launcher would: by a process with the same RANK that joins.

    Raises OptionError for values that cannot be.
    """

    #: whether an error of `run` has the story in it
    tells = True

    def __init__(
        self,
        world_size: int,
        *,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        deadline: float = DEADLINE,
        respawn: int = 0,
    ) -> None:
        __tracebackhide__ = True  # for pytest
        if not isinstance(world_size, int) or world_size < 1:
            raise OptionError(f"ranks({world_size!r}): the number of ranks must be at least 1")
        if not isinstance(deadline, int | float) or not 0 < deadline < math.inf:
            says = "must be greater than zero seconds, and a number of them"
            raise OptionError(f"ranks({world_size}): deadline={deadline!r} {says}")
        if not isinstance(respawn, int) or respawn < 0:
            raise OptionError(f"ranks({world_size}): respawn={respawn!r} is not a number of ranks from 0 on")
        check_variables(f"ranks({world_size})", env or {})
        for name in options or {}:
            if name not in (*OPTIONS, *HOOKS):
                hint = did_you_mean(name, (*OPTIONS, *HOOKS)) or f"; there are {', '.join((*OPTIONS, *HOOKS))}"
                raise OptionError(f"ranks({world_size}): options={{{name!r}: ...}} is no option of Wrapper{hint}")
        self._world_size, self._options, self._env = world_size, dict(options or {}), dict(env or {})
        self.deadline, self._respawn = deadline, respawn
        self._network: Network | None = None
        #: what the last runs told, the latest last
        self.stories: list[str] = []

    def run(
        self,
        program: Callable[..., Any] | str | os.PathLike[str],
        *args: Any,
        faults: Mapping[At, Fault] | None = None,
        check: bool = True,
        **kwargs: Any,
    ) -> Result:
        """Run it on all ranks and wait for their ends.

        Args:
            program: a function of a module, wrapped or calling a wrapped one. Or the path of a script, which runs as
                ``python script.py ARGS`` would.
            args, kwargs: for the function, by pickle; for a script its arguments, as text.
            faults: where they strike -> what they are.
            check: whether it is an AssertionError where a rank did not end as it should: a fault did not strike, a
                program raised, a rank died without a fault, a process was left, or a temporary file of a rank that was
                not killed.

        Raises:
            Deadline: it took longer than ``deadline`` seconds.
            AssertionError: see ``check``. Both have the story of the run.
            OptionError: for what cannot be run, and faults that cannot strike.
        """
        __tracebackhide__ = True  # for pytest
        end = time.monotonic() + self.deadline  # the server may take a while to import torch
        faults = dict(faults or {})
        _check(faults, self._world_size)
        target = _target(program, args, kwargs, self._options)
        _check_that_it_travels("options", self._options)
        _check_that_it_travels("faults", faults)
        if any(isinstance(fault, NetworkCut) for fault in faults.values()):
            self._network = Network(self._world_size)
        run = Run(
            target,
            self._world_size,
            faults=faults,
            # what a test makes a function raise again and again is no bug of it
            args={"max_repeats": repeats_with(faults)},
            env=self._env,
            respawn=self._respawn,
            as_program=True,
            network=self._network,
        )
        try:
            ranks = run.wait(max(0.0, end - time.monotonic()), check=False)
        except Deadline as late:
            self.stories.append(late.story)
            headline = f"{late.headline}; the deadline was {self.deadline:g} s{_unnoticed(late.ranks, faults)}"
            raise Deadline(headline, late.story if self.tells else "") from None
        finally:
            run.close()
            self.close()
        problems = [*ranks.problems, *_problems(ranks, faults)]
        self.stories.append(ranks.story)
        result = Result(ranks, {repr(at): repr(fault) for at, fault in faults.items()}, problems, ranks.story)
        if problems and check:
            raise AssertionError("\n".join([*problems, *(["", result.story] if self.tells else [])]))
        return result

    def close(self) -> None:
        """Take the network down. Ranks are gone when `run` returns or raises."""
        network, self._network = self._network, None
        if network is not None:
            network.close()


# --- what is asked for --------------------------------------------------------------------------------------------


def _check(faults: Mapping[Any, Any], world_size: int) -> None:
    __tracebackhide__ = True
    raising = [phase.value for phase in Phase if phase in RAISING]
    for at, fault in faults.items():
        if not isinstance(at, At):
            raise OptionError(f"faults={{{at!r}: ...}}: the key says where, as in At(rank=1, step=3)")
        if not isinstance(fault, Fault):
            hint = f"write {fault.__name__}()" if isinstance(fault, type) else "use Kill(), Raise(OSError) ..."
            raise OptionError(f"faults={{{at}: {fault!r}}} is no fault: {hint}")
        if type(fault).strike is Fault.strike:
            raise OptionError(f"{at}: {fault} does nothing: its class needs a method strike(context)")
        if at.rank >= world_size:
            raise OptionError(f"{at}: there are ranks 0 to {world_size - 1}; random_faults() has an argument ranks=")
        if isinstance(fault, Raise) and at.phase is not None and at.phase not in raising:
            raise OptionError(
                f"{at}: {fault} needs a phase in which code of the program runs in the main thread: "
                f"{', '.join(map(repr, raising))}. In the others ({', '.join(set(PHASES) - set(raising))}) use Kill()"
            )


def _check_that_it_travels(name: str, value: Any) -> None:
    """Ranks get it by pickle."""
    __tracebackhide__ = True
    try:
        pickle.dumps(value)
    except Exception as error:
        raise OptionError(f"{name}={value!r:.200} cannot be pickled for the ranks: {error}") from error


def _target(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    __tracebackhide__ = True
    if isinstance(program, str | os.PathLike):
        if kwargs:
            raise OptionError(f"run({os.fspath(program)!r}): a script has no keyword arguments: {', '.join(kwargs)}")
        path = Path(program).resolve()
        if not path.is_file():
            raise OptionError(f"run({os.fspath(program)!r}): there is no such script: {path}")
        return Script(options, str(path), tuple(map(str, args)))
    while isinstance(program, functools.partial):
        args, kwargs, program = (*program.args, *args), {**program.keywords, **kwargs}, program.func
    if inspect.ismethod(program) and not isinstance(program.__self__, type):
        args, program = (program.__self__, *args), program.__func__
    module, name = getattr(program, "__module__", None), getattr(program, "__qualname__", "")
    if not callable(program) or not module or not name:
        raise OptionError(f"run({program!r}): pass a function of a module, or the path of a script")
    if "<locals>" in name or "<lambda>" in name:
        raise OptionError(
            f"run({name}): ranks are processes of their own, which import the function by its name; define it at the "
            "top level of its module"
        )
    home = sys.modules.get(module)
    if home is not None and _part(home, name) != program:
        raise OptionError(
            f"run({name}): ranks import the function by its name, and {module}.{name} is not this one: it is inherited "
            "by another class, or wrapped on the spot. Pass a function at the top level of the module that calls it"
        )
    _check_that_it_travels("args", args)
    _check_that_it_travels("kwargs", kwargs)
    payload = pickle.dumps((args, kwargs))
    file = getattr(home, "__file__", None)
    return Function(options, module, file, name, payload)


@dataclass(frozen=True)
class _Program:
    """What a rank runs; travels to it by pickle."""

    options: Mapping[str, Any] = field(repr=False)

    def __call__(self, context: Context) -> None:
        from .instruments import Instruments  # noqa: PLC0415  # with torch: in ranks only

        Instruments(context, self.options).install()
        value = self.run()
        context.keep(value)

    def run(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Function(_Program):
    module: str
    file: str | None
    name: str
    #: (args, kwargs)
    payload: bytes = field(repr=False)

    def run(self) -> Any:
        found = _part(_module(self.module, self.file), self.name)
        args, kwargs = pickle.loads(self.payload)
        return found(*args, **kwargs)


@dataclass(frozen=True)
class Script(_Program):
    path: str
    args: tuple[str, ...]

    def run(self) -> None:
        run_script(self.path, self.args)


def _part(module: Any, name: str) -> Any:
    """``Trainer.fit`` of a module; None where there is none."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _module(name: str, file: str | None) -> Any:
    """By its name, else by its file: pytest imports test modules under names that Python would not find."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        spec = None if file is None else importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None or not (error.name and name.startswith(error.name)):
            raise
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


# --- what is wrong ------------------------------------------------------------------------------------------------


def _problems(ranks: Sequence[RankResult], faults: Mapping[At, Fault]) -> Iterator[str]:
    struck = {event["at"] for rank in ranks for event in rank.of("fault")}
    may_end = _may_end(ranks, faults)
    ends: dict[str, list[int]] = {}
    for rank in ranks:
        wrong = rank.exception is not None or (rank.exitcode != 0 and not rank.came_late)
        if wrong and rank.rank not in may_end:
            ends.setdefault(_ADDRESS.sub("", _end(rank)), []).append(rank.rank)
    # of those that end because of another one's error nothing more is to be said
    concerned = any("\n  RestartAbort: " in how for how in ends)
    for how, numbers in ends.items():
        if concerned and how.startswith("RestartAbort"):
            continue
        yield f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} ended with {how}"
    for at, fault in faults.items():
        if repr(at) not in struck:
            yield f"{at}: {fault} never struck: {_how_far(ranks, at)}"
    if not any(rank.of("call") for rank in ranks) and not any(rank.exception for rank in ranks):
        yield "the program called no function that inprocess.Wrapper has wrapped"


def _end(rank: RankResult) -> str:
    if rank.exception is None:
        return f"exit code {rank.exitcode}, and no fault was to end it"
    told = rank.of("exception")[-1]
    line = f", in {told['line']}" if told["line"] else ""
    if told["cause"]:
        return f"{told['cause']}{line}{_outside(rank)}\n  {rank.exception}: {rank.message}"
    return f"{rank.exception}{line}: {rank.message}{_outside(rank)}"


def _may_end(ranks: Sequence[RankResult], faults: Mapping[At, Fault]) -> Collection[int]:
    """Ranks that a fault may have ended."""
    found = set()
    by_name = {repr(at): (at.rank, fault) for at, fault in faults.items()}
    for name in (event["at"] for rank in ranks for event in rank.of("fault")):
        rank, fault = by_name[name]
        leaves = isinstance(fault, Raise) and _leaves(fault.kind)
        if fault.ends or leaves:
            found |= {rank, *getattr(fault, "ranks", ())}
    return found


def _leaves(kind: type[BaseException] | BaseException) -> bool:
    """Whether a rank that raises it leaves the job; anything else restarts."""
    return issubclass(kind, ENDS) if isinstance(kind, type) else asks_for_end(kind)


def _how_far(ranks: Sequence[RankResult], at: At) -> str:
    """Why a fault may not have struck: what its rank did."""
    mine = [rank for rank in ranks if rank.rank == at.rank]
    entries = [event["iteration"] for rank in mine for event in rank.of("enter")]
    who = f"rank {at.rank}"
    if not entries:
        return f"{who} never entered the function"
    if at.iteration is not None and at.iteration not in entries:
        return f"{who} was in iterations {', '.join(map(str, entries))} only"
    if at.phase is not None:
        names = dict.fromkeys(event["name"] for rank in mine for event in rank.of("phase"))
        return f"{who} was in these phases only: {', '.join(names)}"
    if at.label is not None:
        labels = Counter(event["label"] for rank in mine for event in rank.of("here"))
        told = ", ".join(f"{label!r} ({count} times)" for label, count in labels.items()) or "none at all"
        return f"{who} reached these labels: {told}"
    if at.file is not None:
        return f"{who} wrote no file of that name by torch.save() or open()"
    left = [(event["iteration"], event["pings"]) for rank in mine for event in rank.of("leave")]
    return f"{who} made {', '.join(f'{pings} pings in iteration {n}' for n, pings in left) or 'no ping'}"


def _unnoticed(ranks: Sequence[RankResult], faults: Mapping[At, Fault]) -> str:
    """What a reader asks first where a deadline has passed: whether a fault has struck that only a timeout ends."""
    struck = {event["at"] for rank in ranks for event in rank.of("fault")}
    waits = [
        f"{at}: {fault} ({fault.noticed_by})" for at, fault in faults.items() if fault.noticed_by and repr(at) in struck
    ]
    shorter = "give shorter timeouts by options={'soft_timeout': 2, 'hard_timeout': 4}"
    return f". Only a timeout ends {', '.join(waits)}: {shorter}" if waits else ""


def _outside(rank: RankResult) -> str:
    """Why, where the program has process groups that no restart can make anew."""
    lines = []
    if rank.of("group_outside"):
        places = ", ".join(dict.fromkeys(event["where"] for event in rank.of("group_outside")))
        lines.append(f"process groups were made outside the wrapped function, in {places}: make them inside it")
    if rank.of("group_kept"):
        names = ", ".join(rank.of("group_kept")[-1]["where"])
        lines.append(f"a process group of an earlier run of the function, which a restart has ended, is in {names}")
    return "".join(f"\n  {line}" for line in lines)
