"""The GPU benchmarks: phases from marks, tables with and without results, and what is said where there is no GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import live, restart, results, step
from benchmarks.gpu.place import Place
from benchmarks.gpu.plan import BUDGET, CASES, PARTS, PHASES, QUICK, STATES, requests
from benchmarks.job import Mark, here

FAULT = 1_000
BY_NAME = {case.name: case for case in CASES}
MACHINE: dict[str, Any] = {
    "gpus": ["a GPU"],
    "driver": "1.2",
    "torch": "2.9",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "python": "3.12",
    "system": "Linux",
    "cores": 16,
    "date": "2026-01-01",
    "variables": {},
}


def marks_of_a_restart(ended: int = 0) -> list[Mark]:
    """Two ranks; each mark is one later than the one before, on rank 0 half of that earlier."""
    found = [Mark("healthy", rank, 0, 10) for rank in (0, 1)]  # before the function
    marked = [phase for phase in PHASES if not phase.first and phase.mark != "ended"]
    for number, phase in enumerate(marked, 1):
        found.append(Mark(phase.mark, 0, phase.iteration, FAULT + 100 * number - 50))
        found.append(Mark(phase.mark, 1, phase.iteration, FAULT + 100 * number))
    found += [Mark("ended", rank, -1, FAULT + 99_999) for rank in (0, 1)]
    return [*found[:-1], Mark("ended", 1, -1, FAULT + ended)] if ended else found


def test_phases_add_up_to_the_whole() -> None:
    phases = restart.split(marks_of_a_restart(), FAULT, BY_NAME["exception"])
    assert phases == {
        "outcome known": 50,
        "on all ranks": 50,
        **dict.fromkeys([phase.name for phase in PHASES[2:] if not phase.optional], 100),
    }
    assert sum(phases.values()) == 900


def test_a_second_abort_belongs_to_the_first() -> None:
    again = [Mark("abort", 1, 0, FAULT + 190), Mark("aborted", 1, 0, FAULT + 195)]
    found = [*marks_of_a_restart(), *again]
    assert restart.split(found, FAULT, BY_NAME["exception"]) == restart.split(
        marks_of_a_restart(), FAULT, BY_NAME["exception"]
    )


def test_the_end_of_a_process_that_is_waited_for_is_a_phase() -> None:
    phases = restart.split(marks_of_a_restart(ended=430), FAULT, BY_NAME["kernel"])
    assert phases["process ended"] == 30
    assert phases["end round"] == 70
    assert sum(phases.values()) == 900


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_waited_for_is_a_phase_of_it(case: Any) -> None:
    assert set(case.waits) <= restart.split(marks_of_a_restart(), FAULT, case).keys()


def test_ranks_that_share_a_gpu_are_hosts_for_nccl() -> None:
    place = Place("cuda", 1)
    assert place.environment(3, 4)["NCCL_HOSTID"] == "host3"
    assert place.environment(3, 4)["LOCAL_RANK"] == "0"
    assert place.backend == "nccl"


def test_ranks_with_a_gpu_each_are_left_alone() -> None:
    assert Place("cuda", 4).environment(3, 4) == {"LOCAL_RANK": "3"}
    assert Place("cpu").environment(3, 4) == {}


LACKING = [
    ({"cuda": "", "gpus": []}, "built without CUDA"),
    ({"gpus": []}, "finds no CUDA device"),
    ({"nccl": ""}, "built without NCCL"),
]


@pytest.mark.parametrize(("changes", "words"), LACKING)
def test_without_a_gpu_it_says_so(changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.checked("cuda", MACHINE | changes)
    assert raised.value.code == 2
    told = capsys.readouterr().err
    assert words in told
    assert "--device cpu" in told
    assert command.checked("cpu", MACHINE | changes)["backend"] == "gloo"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("quick", [True, False])
def test_plan(part: str, quick: bool) -> None:
    """All of it within eight minutes, the small machine's sizes small, each request with a limit within its part's."""
    assert sum(BUDGET.values()) <= 420
    assert QUICK[part] <= BUDGET[part]
    for request in requests("cpu", part, quick):
        assert 0 < request.limit <= BUDGET[part]
        assert request.key.startswith(part)


def test_what_is_left_limits_all_but_restarts() -> None:
    (fault, *_), (steps, *_) = (requests("cuda", part, False) for part in ("restart", "step"))
    assert fault.within(3.0).limit == fault.limit
    assert steps.within(3.0).limit == 3.0


def test_tables_without_results_say_what_is_missing() -> None:
    text = results.tables({})
    rows = 1 + 2 * 2 * len(CASES) + 2 + 2 * len(STATES["cuda"])
    assert text.count(results.MISSING) == rows
    assert results.MISSING not in results.tables({"machine": command.checked("cpu", MACHINE), "entries": {}})


def a_restart(total: float) -> dict[str, Any]:
    values = {"total": total, "waited": 0.0, "restart": total, "group at the start": 5.0}
    phases = {phase.name: 1.5 for phase in PHASES if not phase.optional}
    return {"values": values, "phases": phases, "note": "", "victim": "SIGKILL"}


def of(**entries: Any) -> dict[str, Any]:
    return {"machine": command.checked("cuda", MACHINE), "entries": entries}


def test_a_restart_in_the_tables() -> None:
    stuck = {"values": {}, "note": "ranks [0] do not go on within 40 s", "stderr": "something"}
    found = of(**{"restart kill 2 ranks": results.collect([a_restart(30.0), stuck, a_restart(10.0), a_restart(20.0)])})
    (row,) = [line for line in results.restarts(found).splitlines() if line.startswith("| SIGKILL | 2 ")]
    assert "**20** (10 to 30); 1 of 4 fail" in row
    assert row.endswith("| SIGKILL |")
    (row,) = [line for line in results.phases(found).splitlines() if line.startswith("| SIGKILL | 2 ")]
    assert row.count("1.5") == len(PHASES) - 1


def test_a_restart_that_never_happened_is_described() -> None:
    stuck = {"values": {}, "note": "ranks [0] do not go on within 40 s"}
    found = of(**{"restart kill 4 ranks": results.collect([stuck])})
    assert "| SIGKILL | 4 | ranks [0] do not go on within 40 s |" in results.restarts(found)


def test_turns_of_steps() -> None:
    """Of two turns the second one was cut off; with the library a step takes a tenth longer."""
    seconds = dict.fromkeys(step.VARIANTS, 0.011) | {step.BARE: 0.01, step.AGAIN: 0.01}
    found = [
        Mark("step", rank, 0, 0, {"variant": name, "seconds": time})
        for rank in (0, 1)
        for name, time in seconds.items()
    ]
    found += [Mark("step", rank, 1, 0, {"variant": step.BARE, "seconds": 9.0}) for rank in (0, 1)]
    turns = step.complete_turns(found, 2)
    assert turns == [pytest.approx(seconds)]
    run = {"values": step.slower(turns), "note": "", "parameters": 27e6}
    text = results.steps(of(**{"step 2 ranks": results.collect([run])}))
    assert (
        "| 2 | **10** (10 to 10) | **10** (10 to 10) | **10** (10 to 10) | **10** (10 to 10) | **0** (0 to 0) |" in text
    )
    assert "27 million parameters" in text


def test_states_beside_the_plain_way() -> None:
    taken = {live.PLAIN: [1.0, 2.0, 3.0], live.RECOVER: [4.0, 4.0, 4.0]}
    found = of(**{"live 2 ranks 8 GB": results.collect([{"values": taken, "note": "", "bytes": 8e9}])})
    text = results.states(found)
    assert f"| 8 GB | {live.RECOVER} | **4** (4 to 4) | 2.00 | 50% of {live.PLAIN} |" in text
    assert f"| 1 GB | {live.RECOVER} | {results.MISSING} |" in text


def test_the_documentation_has_these_tables() -> None:
    """Written by `python -m benchmarks.gpu --table`."""
    written = (here() / "docs" / "performance" / "gpu.md").read_text()
    found = here() / "benchmarks" / "gpu" / "results.json"
    assert written == results.tables(json.loads(found.read_text()) if found.exists() else {}) + "\n"
