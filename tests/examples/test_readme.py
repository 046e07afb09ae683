"""The README does not lie: its commands are the ones CI runs, its links and its example's options exist."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import fault_schedule
import pytest

from benchmarks import pictures, report, training_report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
#: what the README shows as a picture of a terminal
SAMPLE = pictures.RECORDING.read_text()


def commands():
    """The two commands under "Try it"."""
    section = README.split("## Try it")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)\n```", section, re.DOTALL)


def test_two_commands_of_one_line_each():
    assert len(commands()) == 2
    assert all("\n" not in command for command in commands())


def test_ci_runs_the_second_command_as_it_stands():
    script = ROOT / ".ci/run"
    assert commands()[1] in script.read_text().splitlines()
    assert os.access(script, os.X_OK)


def test_the_first_command_has_five_faults_and_kills_rank_0():
    words = shlex.split(commands()[0])
    faults = fault_schedule.parse(words[words.index("--faults") + 1])
    assert len(faults) >= 5
    assert any(fault.kind == "kill" and fault.rank == 0 for fault in faults)


def test_the_sample_is_what_the_first_command_prints():
    """See test_digits for what that is."""
    asked = SAMPLE.splitlines()[0].removeprefix("$ ")
    assert asked.startswith("python examples/")
    assert commands()[0].endswith(f".venv/bin/{asked}")


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=lambda page: page.name)
def test_links_to_files_exist(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_sample_names_the_line_that_hangs():
    """What the example prints, see test_digits; the line is where the schedule's hang is."""
    (file, line, function) = re.search(r"was at (\S+\.py):(\d+) in (\w+); 2 waited for others", SAMPLE).groups()
    source = (ROOT / "examples" / file).read_text().splitlines()
    assert function == fault_schedule.STRIKES["hang"].__name__
    assert "time.sleep" in source[int(line) - 1]


def test_figures_are_those_that_were_measured():
    """`python -m benchmarks --no-run` prints what is to be quoted."""
    results = json.loads((ROOT / "benchmarks/results.json").read_text())
    text = " ".join(README.split())
    missing = [line for line in report.quotes(results) if line not in text]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md", "docs/performance/summary.md"])
def test_what_a_restart_takes_in_a_training_is_what_was_measured(page):
    """`python -m benchmarks.training --write` renews it."""
    (sentence,) = training_report.quotes(training_report.read())
    assert sentence in " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_what_is_said_beside_the_picture_is_what_was_measured(page):
    assert training_report.caption(training_report.read()) in " ".join((ROOT / page).read_text().split())


def test_the_table_of_trainings_is_what_was_measured():
    assert training_report.PAGE.read_text() == training_report.page(training_report.read())


def test_the_summary_is_what_was_measured(tmp_path):
    """The first page and that about performance include it."""
    results = json.loads((ROOT / "benchmarks/results.json").read_text())
    kept = training_report.read()
    report.write_summary(results, tmp_path, training_report.quotes(kept), training_report.where(kept))
    assert (ROOT / "docs/performance/summary.md").read_text() == (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("path", pictures.pictures(), ids=lambda path: path.name)
def test_pictures_are_drawn_from_what_was_measured_and_recorded(path):
    """`python -m benchmarks.pictures` draws them anew."""
    assert path.read_text() == pictures.pictures()[path]


def test_the_pictures_are_shown():
    shown = re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^]]*\]\(([^)]+)\)', README)
    screenshot = pictures.FOLDER / "report.png"
    assert {ROOT / (html or markdown) for html, markdown in shown} == {*pictures.pictures(), screenshot}
    assert screenshot.read_bytes().startswith(b"\x89PNG")
    (after,) = re.findall(r"<title>.* (after \d+ ms)</title>", (pictures.FOLDER / "restart-light.svg").read_text())
    assert f'{after}."' in README  # for those who do not see it
    assert (ROOT / "docs/index.md").read_text().count(f'{after}"') == 2


def test_the_sample_names_no_folder_of_the_machine():
    assert "Traceback" not in SAMPLE
    assert not re.search(r"(^|\s)/|File \"", SAMPLE)
    announced = "rank 1: an error that is new in this call; its traceback, once:"
    lines = ["step", announced, "Traceback (most recent call last):", '  File "/a"', "KeyError: 1", "restart 2"]
    assert list(pictures.without_tracebacks(lines)) == ["step", "restart 2"]
