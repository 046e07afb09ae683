"""What is measured, for whom, and what was aimed at. Only data; `python -m benchmarks` carries it out."""

from __future__ import annotations

from dataclasses import dataclass

#: seconds after which an attempt counts as one that does not go on
HANG = 20


@dataclass(frozen=True)
class Contender:
    """A library with a setting."""

    name: str
    #: the environment it runs in: "" is this one, otherwise one of `peers.PEERS`
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
    #: unit and digits of the values
    unit: str = "ms"


PEERS = (NVRX, NVRX_TUNED)
WAITS = {
    "loop": "a Python loop",
    "allreduce": "an all-reduce",
    "sleep": "`time.sleep`",
    "queue": "`queue.get`",
}


def exceptions() -> list[Case]:
    cases = []
    for size in (2, 4, 8):
        targets = {"entry": 25.0, "reduced": 40.0} if size < 8 else {"entry": 80.0}
        for where, words in WAITS.items():
            arguments = f"--world-size {size} --fault raise --where {where}"
            contenders, stuck = [OURS], []
            if where == "loop":
                contenders += [*PEERS, *((TORCHRUN,) if size == 4 else ())]
            elif size == 4:
                stuck += PEERS
                arguments += f" --limit {HANG}"
            cases.append(
                Case(
                    "restart_exception",
                    f"{size} ranks, in {words}",
                    "restart",
                    arguments,
                    targets,
                    tuple(contenders),
                    tuple(stuck),
                )
            )
    return cases


def kills() -> list[Case]:
    def case(
        label: str,
        arguments: str,
        contenders: tuple[Contender, ...] = (OURS,),
        stuck: tuple[Contender, ...] = (),
        limit: float = 60.0,
    ) -> Case:
        return Case(
            "restart_kill", label, "restart", f"{arguments} --limit {HANG}", {"entry": limit}, contenders, stuck
        )

    return [
        case("SIGKILL of rank 1, in a Python loop", "--fault kill --victim 1", (OURS, *PEERS)),
        case("SIGKILL of rank 0, in a Python loop", "--fault kill --victim 0", (OURS,), PEERS),
        case("SIGKILL of rank 0, in an all-reduce", "--fault kill --victim 0 --where allreduce", (OURS,), PEERS),
        case("SIGKILL of rank 1, in an all-reduce", "--fault kill --victim 1 --where allreduce",
             (OURS, *PEERS, TORCHRUN, TORCHFT, TORCHFT_TUNED)),
        case("SIGKILL of rank 2, in an all-reduce", "--fault kill --victim 2 --where allreduce"),
        case("SIGKILL of rank 3, in an all-reduce", "--fault kill --victim 3 --where allreduce"),
        case("host of rank 3 lost, in an all-reduce", "--fault host --victim 3 --where allreduce"),
        case("SIGSTOP of rank 1, released, in an all-reduce", "--fault release --where allreduce", (OURS,), PEERS),
        case("SIGSTOP of rank 1, released, in a Python loop", "--fault release --where loop"),
        case("SIGSTOP of rank 1 for ever, in an all-reduce", "--fault stop --where allreduce", (OURS,), PEERS),
        case("rank 1 hangs with the GIL held, in an all-reduce", "--fault gil --where allreduce", (OURS,), PEERS),
    ]  # fmt: skip


OTHERS = [
    Case("restart_hot_spare", "1 of 3 active ranks killed, 1 spare, in an all-reduce", "restart",
         f"--spares 1 --fault kill --where allreduce --limit {HANG}", {"entry": 60.0}, (OURS, *PEERS)),
    Case("steady_state", "idle rank", "idle", "", {"percent": 0.2}, (OURS, *PEERS), unit=""),
    Case("steady_state", "2 ms step with ping() and atomic()", "step", "", {"median_percent": 0.5}, (OURS, NVRX),
         unit="%"),
    Case("calls", "ping and atomic", "calls", "", {"ping_wall": 300.0, "atomic_wall": 1500.0}, (OURS, NVRX), unit="ns"),
]  # fmt: skip

GOODPUT = [
    Case("goodput", "60 s of training, a fault every 5 s", "goodput", "", {}, (PLAIN, OURS, *PEERS, TORCHRUN), unit=""),
]

CASES = [*exceptions(), *kills(), *OTHERS, *GOODPUT]
