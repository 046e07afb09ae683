"""The ruler of restarts in a training: its table, what the documentation quotes of it, checkouts and arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, report, training, training_report
from benchmarks.job import here
from benchmarks.plan import CASES, OURS
from benchmarks.training_report import HERE

MACHINE = {"date": "2026-01-02", "cores": "2"}


def job(*entries: float, note: str = "", lost: int = 0) -> dict[str, Any]:
    """A job whose restarts took so long; its first ``lost`` ones were not measured."""
    restarts = [
        {"first": number == 0, "entry": entry, "step": entry + 30.0} for number, entry in enumerate(entries, lost)
    ]
    return {"restarts": restarts, "note": note}


def kept(**revisions: dict[str, Any]) -> training_report.Kept:
    return training_report.condense({HERE: ours(), **revisions}, MACHINE)


def ours() -> dict[str, Any]:
    return {"training": [job(14, 12, 11), job(12, 13, 10)], "empty": [job(10, 8, 7), job(10, 9, 6)]}


def rows(text: str) -> dict[str, list[str]]:
    """Label -> the other cells."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {label: cells for label, *cells in lines}


# --- what is kept -------------------------------------------------------------------------------------------------


def test_first_and_later_restarts_are_kept_apart_and_sorted() -> None:
    condensed = kept()["revisions"][HERE]["training"]
    assert condensed["jobs"] == 2
    assert condensed["first"] == {"entry": [12, 14], "step": [42, 44]}
    assert condensed["later"]["entry"] == [10, 11, 12, 13]
    assert condensed["notes"] == {}
    assert kept()["machine"] == MACHINE


def test_a_later_restart_is_none_the_less_where_the_first_was_lost() -> None:
    found = {HERE: {"training": [job(12, note="stuck", lost=1), job(note="stuck")], "empty": []}}
    condensed = training_report.condense(found)["revisions"][HERE]
    assert condensed["training"]["first"]["entry"] == []
    assert condensed["training"]["later"]["entry"] == [12]
    assert condensed["training"]["notes"] == {"stuck": 2}
    assert condensed["empty"]["jobs"] == 0


def test_it_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    assert training_report.read(path) == {"machine": {}, "revisions": {}}
    path.write_text(json.dumps(kept()))
    assert training_report.read(path) == kept()


# --- the table ----------------------------------------------------------------------------------------------------


def test_medians_spread_and_the_empty_function() -> None:
    found = rows(training_report.table(kept()))
    assert found["in a training: fault to entry, first restart"] == ["**13** (12 to 14)"]
    assert found["in a training: fault to first optimizer step, later restarts"] == ["**41.5** (40 to 43)"]
    assert found["empty function: fault to first all-reduce, first restart"] == ["**40** (40 to 40)"]
    assert found["training / empty function: fault to entry, first restart"] == ["1.30"]


def test_what_the_training_does_after_its_entry() -> None:
    """Between two marks of the last rank each, not since the fault; a restart without all marks is left out."""
    marks = {"entry": 10.0, "group": 14.0, "model": 20.0, "batch": 21.0, "step": 51.0}
    restarts = [
        {"first": True, **marks},
        {"first": False, **marks, "group": 15.0},
        {"first": False, "entry": 10.0, "step": 51.0},
    ]
    jobs = {"training": [{"restarts": restarts, "note": ""}], "empty": []}
    found = rows(training_report.steps({HERE: jobs, "before": ours()}))
    assert found[f"{HERE}, first restart"] == [
        "**4** (4 to 4)",
        "**6** (6 to 6)",
        "**1** (1 to 1)",
        "**30** (30 to 30)",
    ]
    assert found[f"{HERE}, later restarts"] == [
        "**5** (5 to 5)",
        "**5** (5 to 5)",
        "**1** (1 to 1)",
        "**30** (30 to 30)",
    ]
    assert found["before, first restart"] == [training_report.NOTHING] * 4
    assert len(found["in a training, ms"]) == 4


def test_another_revision_beside_it() -> None:
    slow = {"training": [job(130, 23)], "empty": [job(10, 8)]}
    found = rows(training_report.table(kept(before=slow)))
    assert found["ms: median (least to greatest)"] == [HERE, "before", f"before / {HERE}"]
    assert found["in a training: fault to entry, first restart"][1:] == ["**130** (130 to 130)", "10.00"]
    assert found["training / empty function: fault to entry, first restart"] == ["1.30", "13.00", ""]


def test_what_was_not_measured_is_said() -> None:
    nothing = {"training": [job(note="ranks [0] do not go on")], "empty": []}
    text = training_report.page(kept(before=nothing))
    found = rows(text)
    assert found["in a training: fault to entry, first restart"] == [
        "**13** (12 to 14)",
        training_report.NOTHING,
        "",
    ]
    assert found["training / empty function: fault to entry, later restarts"][1:] == ["", ""]
    assert "What failed: ranks [0] do not go on." in text
    assert text.endswith("Measured: date 2026-01-02, cores 2.\n")


def test_nothing_at_all() -> None:
    empty = training_report.read(Path("/nowhere"))
    assert training_report.quotes(empty) == []
    assert training_report.caption(empty) == ""
    assert training_report.NOTHING in training_report.page(empty)


def test_rows_in_a_training_wait_for_their_values() -> None:
    """The plan has them; the tables leave out what is not in the results."""
    cases = [case for case in CASES if "--body training" in case.arguments]
    assert len(cases) >= 6
    assert all("in a training" in case.label for case in cases)
    assert report.rows({"machine": {}, "cases": {}}, cases) == []
    assert OURS in cases[0].contenders


# --- what is quoted -----------------------------------------------------------------------------------------------


def test_the_sentence_has_both_functions_and_first_and_later_restarts() -> None:
    (sentence,) = training_report.quotes(kept())
    assert "it takes **13 ms** at the first restart of a job and 12 ms at later ones" in sentence
    assert "to the first optimizer step 43 ms and 42 ms" in sentence
    assert "all-reduce it takes 10 ms and 8 ms to the entry" in sentence
    assert training_report.caption(kept()).endswith("raises: 13 ms at the first restart, 12 ms at later ones")


def test_without_later_restarts_nothing_is_quoted() -> None:
    found = training_report.condense({HERE: {"training": [job(12)], "empty": [job(10)]}})
    assert training_report.quotes(found) == []
    assert training_report.caption(found) == ""


def test_numbers_are_renewed_where_they_stand() -> None:
    text = "before\n* It takes **14 ms**\n  and 1,200.5 ms of 2 ranks.\nIt takes 3 ms.\n"
    assert training_report.renewed(text, "It takes **7 ms** and 8 ms of 2 ranks.") == (
        "before\n* It takes **7 ms**\n  and 8 ms of 2 ranks.\nIt takes 3 ms.\n"
    )


def test_a_text_without_the_sentence_stays() -> None:
    assert training_report.renewed("something else: 3 ms", "It takes 7 ms") == "something else: 3 ms"


def test_write_renews_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "performance").mkdir()
    (tmp_path / "benchmarks/results.json").write_text((training_report.ROOT / "benchmarks/results.json").read_text())
    page = tmp_path / "page.md"
    page.write_text(training_report.quotes(kept())[0].replace("13 ms", "99 ms").replace(" one raises", "\none raises"))
    monkeypatch.setattr(training_report, "ROOT", tmp_path)
    monkeypatch.setattr(training_report, "KEPT", tmp_path / "benchmarks/training.json")
    monkeypatch.setattr(training_report, "PAGE", tmp_path / "performance/training.md")
    monkeypatch.setattr(training_report, "QUOTING", (page,))
    training_report.write(kept())
    (sentence,) = training_report.quotes(kept())
    assert page.read_text() == sentence.replace(" one raises", "\none raises")
    assert json.loads((tmp_path / "benchmarks/training.json").read_text()) == kept()
    assert (tmp_path / "performance/summary.md").read_text().startswith(f"* {sentence}\n* **One of 4")


def test_the_picture_says_it_below() -> None:
    results = json.loads((training_report.ROOT / "benchmarks/results.json").read_text())
    assert "in a training: 5 ms" in pictures.restart(results, pictures.LIGHT, "in a training: 5 ms")
    assert "in a training" not in pictures.restart(results, pictures.LIGHT)


# --- another revision, and arguments ------------------------------------------------------------------------------


def test_a_checkout_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "inprocess").mkdir()
    (tmp_path / "inprocess/__init__.py").write_text("")
    with training.checkout(str(tmp_path)) as root:
        assert (root / "inprocess").resolve() == tmp_path / "inprocess"
        assert (root / "benchmarks").resolve() == here() / "benchmarks"
    assert not root.exists()
    assert (tmp_path / "inprocess/__init__.py").exists()


def test_what_is_no_revision_is_said() -> None:
    with pytest.raises(SystemExit) as raised, training.checkout("no-such-revision"):
        pass
    assert str(raised.value).startswith("--against no-such-revision: neither a revision nor a checkout")


def test_defaults() -> None:
    options = training.parsed([])
    assert (options.jobs, options.restarts) == (training.JOBS, training.RESTARTS)
    options = training.parsed(["--quick", "--jobs", "2"])
    assert (options.jobs, options.restarts) == (2, training.QUICK_RESTARTS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--write --quick", "leave out --quick and --device"),
        ("--write --device cuda", "leave out --quick and --device"),
        ("--write --restarts 1", "needs --restarts 2 or more"),
        ("--write --against .", "needs a revision"),
    ],
)
def test_what_is_not_kept(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parsed(arguments.split())
    assert words in capsys.readouterr().err
