"""What is measured, for whom, and what was aimed at. Only data; `python -m benchmarks` carries it out."""

from __future__ import annotations

from dataclasses import dataclass

#: seconds after which an attempt counts as one that does not go on
HANG = 15
#: the phases of a restart in their order, and the mark and its iteration that end each; the first begins at the fault
PHASES = {
    "detect": ("abort", 0),
    "abort": ("aborted", 0),
    "leave function": ("left", 0),
    "end round": ("assign", 1),
    "assign": ("assigned", 1),
    "start round": ("initialize", 1),
    "enter": ("entry", 1),
    "new group": ("reduced", 1),
}
#: world size -> milliseconds from the first call to the entry, at most
STARTUP = {4: 2000.0}


@dataclass(frozen=True)
class Contender:
    """A library with a setting."""

    name: str
    #: the environment it runs in: "" is this one, otherwise one of `peers.PACKAGES`
    peer: str
    arguments: str
    script: str = ""


OURS = Contender("inprocess", "", "--library inprocess")
NVRX = Contender("nvrx", "nvrx", "--library nvrx")
NVRX_TUNED = Contender("nvrx, tuned", "nvrx", "--library nvrx --setting tuned")
TORCHRUN = Contender("torchrun", "", "--library torchrun")
TORCHFT = Contender("torchft", "torchft", "", "torchft_restart")
TORCHFT_TUNED = Contender("torchft, tuned", "torchft", "--tuned", "torchft_restart")
PLAIN = Contender("no library", "", "--library plain")


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    benchmark: str
    label: str
    script: str
    arguments: str
    #: value -> at most
    targets: dict[str, float]
    contenders: tuple[Contender, ...] = (OURS,)
    #: those that do not go on by themselves here: three attempts are enough to say so
    stuck: tuple[Contender, ...] = ()


PEERS = (NVRX, NVRX_TUNED)
WAITS = {
    "loop": "a Python loop",
    "allreduce": "an all-reduce",
    "sleep": "`time.sleep`",
    "queue": "`queue.get`",
}
#: the same where the function is a training
TRAINING = "--body training"
TRAINING_WAITS = {"loop": "forward passes", "allreduce": "the backward pass"}


def exceptions() -> list[Case]:
    cases = []
    for size in (2, 4, 8):
        targets = {"entry": 25.0, "reduced": 40.0} if size < 8 else {"entry": 80.0}
        for where, words in WAITS.items():
            contenders = (
                {2: (OURS, *PEERS), 4: (OURS, *PEERS, TORCHRUN), 8: (OURS,)}[size] if where == "loop" else (OURS,)
            )
            stuck = PEERS if size == 4 and where != "loop" else ()
            arguments = f"--world-size {size} --fault raise --where {where} --limit {HANG}"
            label = f"{size} ranks, in {words}"
            cases.append(Case("restart_exception", label, "restart", arguments, targets, contenders, stuck))
    for size in (2, 4):
        for where, words in TRAINING_WAITS.items():
            contenders = (OURS, *PEERS, TORCHRUN) if (size, where) == (4, "loop") else (OURS,)
            arguments = f"{TRAINING} --world-size {size} --fault raise --where {where} --limit {HANG}"
            label = f"{size} ranks in a training, in {words}"
            targets = {"entry": 25.0} if size == 2 else {}
            cases.append(Case("restart_exception", label, "restart", arguments, targets, contenders))
    return cases


def _kill(
    label: str, arguments: str, contenders: tuple[Contender, ...] = (OURS,), stuck: tuple[Contender, ...] = ()
) -> Case:
    targets = {"entry": 60.0}
    return Case("restart_kill", label, "restart", f"{arguments} --limit {HANG}", targets, contenders, stuck)


KILLS = [
    _kill("SIGKILL of rank 1, in a Python loop", "--fault kill --victim 1", (OURS, *PEERS)),
    _kill("SIGKILL of rank 0, in a Python loop", "--fault kill --victim 0", (OURS,), PEERS),
    _kill("SIGKILL of rank 0, in an all-reduce", "--fault kill --victim 0 --where allreduce", (OURS,), PEERS),
    _kill("SIGKILL of rank 1, in an all-reduce", "--fault kill --victim 1 --where allreduce",
          (OURS, TORCHRUN, TORCHFT, TORCHFT_TUNED), PEERS),
    _kill("SIGKILL of rank 2, in an all-reduce", "--fault kill --victim 2 --where allreduce"),
    _kill("SIGKILL of rank 3, in an all-reduce", "--fault kill --victim 3 --where allreduce"),
    _kill("host of rank 3 lost, in a Python loop", "--fault host --victim 3"),
    Case("restart_kill", "host of rank 0 lost, in a Python loop", "restart", f"--fault host --victim 0 --limit {HANG}",
         {"entry": 2000.0}),
    _kill("SIGSTOP of rank 1, released, in an all-reduce", "--fault release --where allreduce", (OURS,), PEERS),
    _kill("SIGSTOP of rank 1, released, in a Python loop", "--fault release --where loop"),
    _kill("SIGSTOP of rank 1 for ever, in an all-reduce", "--fault stop --where allreduce", (OURS,), PEERS),
    _kill("rank 1 hangs with the GIL held, in an all-reduce", "--fault gil --where allreduce", (OURS,), PEERS),
    *(_kill(f"SIGKILL of rank {rank} in a training, in the backward pass",
            f"{TRAINING} --fault kill --victim {rank} --where allreduce") for rank in (0, 1)),
]  # fmt: skip

OTHERS = [
    Case("restart_hot_spare", "1 of 3 active ranks killed, 1 spare, in an all-reduce", "restart",
         f"--spares 1 --fault kill --where allreduce --limit {HANG}", {"entry": 60.0}, (OURS, *PEERS)),
    Case("restart_hot_spare", "1 of 3 active ranks killed in a training, 1 spare, in the backward pass", "restart",
         f"{TRAINING} --spares 1 --fault kill --where allreduce --limit {HANG}", {"entry": 60.0}),
    Case("steady_state", "idle rank", "idle", "", {"percent": 0.2}, (OURS, NVRX)),
    Case("steady_state", "2 ms step with ping() and atomic()", "step", "", {"median_percent": 0.5},
         (OURS, NVRX, PLAIN)),
    Case("calls", "ping and atomic", "calls", "", {"ping_wall": 300.0, "atomic_wall": 1500.0}, (OURS, NVRX)),
]  # fmt: skip

GOODPUT = Case("goodput", "60 s of training, a fault every 5 s", "goodput", "", {}, (PLAIN, OURS, *PEERS, TORCHRUN))

CASES = [*exceptions(), *KILLS, *OTHERS, GOODPUT]
