"""`inprocess metrics` beside a training with faults, asked by a real Prometheus where there is one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from inprocess.initialize import RetryController
from inprocess.reports.accounting import Accounting, account, total
from inprocess.reports.incident import all_incidents
from inprocess.reports.reading import read
from inprocess.reports.summary import read_summary
from inprocess.system import clock
from tests.harness import At, Hang, HostLoss, Kill, Raise, strangers
from tests.harness.endpoint import address, ended, first_line, get, get_json, serving, until
from tests.harness.launch import BEATING, HASTY, PATIENT
from tests.harness.prometheus import MISSING, PROMETHEUS, PROMTOOL, ask_until, prometheus
from tests.unit.test_metrics import live, put

from . import targets

#: longest wait for a program to have seen something (seconds)
LIMIT = 30.0
#: and for a rank to end after its last event
LAST_S = 0.5
DOCS = Path(__file__).parents[2] / "docs"
FAULTS = {At(1, step=1): Raise(ValueError), At(2, 1, step=1): Kill()}


def test_ranks_as_they_are(tmp_path: Path) -> None:
    told = live(0, wall_time=clock.wall(), progress_age=100.0, interval=LIMIT)  # not stale on a slow machine
    put(tmp_path, told, live(1, state="dead"))
    with serving(tmp_path) as where:
        text = until(f"{where}/metrics", "inprocess_rank_up{", time.monotonic() + LIMIT)
        assert 'inprocess_rank_up{host="node0",rank="0"} 1.0' in text
        assert 'inprocess_rank_up{host="node1",rank="1"} 0.0' in text
        ages = dict(re.findall(r'^inprocess_progress_age_seconds\{rank="(\d)"\} (\S+)', text, re.MULTILINE))
        assert ages.keys() == {"0"} and 100.0 <= float(ages["0"]) < 100.0 + LIMIT
        assert get_json(f"{where}/status") == {"ranks": [told, live(1, state="dead")]}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{where}/")
        put(tmp_path, live(2))
        until(f"{where}/metrics", 'rank="2"', time.monotonic() + LIMIT)


def test_a_directory_that_nobody_has_written_to_yet(tmp_path: Path) -> None:
    with serving(tmp_path) as where:
        assert "inprocess_build_info" in get(f"{where}/metrics")
        assert get_json(f"{where}/status") == {"ranks": []}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{}/none"], "RUN_DIR={}/none is no directory: pass the one that the job was given with Wrapper(run_dir="),
        (["{}", "--listen", "nowhere"], "--listen=nowhere: 'nowhere' is no port: pass [HOST:]PORT"),
        (["{}", "--listen", "192.0.2.1:9464"], "--listen=192.0.2.1:9464: Cannot assign requested address: pass an"),
    ],
)
def test_what_keeps_it_from_beginning(tmp_path: Path, arguments: list[str], says: str) -> None:
    given = [each.format(tmp_path) for each in arguments]
    found = subprocess.run(
        [sys.executable, "-m", "inprocess", "metrics", *given], check=False, capture_output=True, text=True
    )
    assert found.returncode == 2 and says.format(tmp_path) in found.stderr and "Traceback" not in found.stderr


def test_without_the_library_of_prometheus(tmp_path: Path) -> None:
    """The error says how to get it."""
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')")
    command = [sys.executable, "-m", "inprocess", "metrics", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert found.returncode == 2
    assert 'needs the package prometheus-client (not here): pip install "inprocess[prometheus]"' in found.stderr


def test_strangers_keep_nobody_waiting_and_leave_no_line(tmp_path: Path) -> None:
    """Seventeen lines of traceback for each one that is silent, or resets, before; some kept a thread each."""
    command = [sys.executable, "-m", "inprocess", "metrics", str(tmp_path), "--listen", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with ended(process), contextlib.ExitStack() as stack:
        where = address(first_line(process))
        assert process.stdout is not None
        for _ in range(10):
            strangers.surround(stack, ("127.0.0.1", int(where.rpartition(":")[2])))
        begin = time.monotonic()
        assert "inprocess_build_info" in get(f"{where}/metrics") and get_json(f"{where}/status") == {"ranks": []}
        assert time.monotonic() - begin < 5.0
        process.terminate()
        assert process.stdout.read() == b""


def queries() -> list[str]:
    """Those of the documentation, without the windows that are too long for a test."""
    (section,) = re.findall(r"^## Queries\n(.*?)^## ", (DOCS / "metrics.md").read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"```promql\n(.*?)\n```", section, re.DOTALL)


@pytest.mark.skipif(PROMETHEUS is None, reason=MISSING)
@pytest.mark.slow
@pytest.mark.timeout(210)
def test_a_real_prometheus(launch: Any, tmp_path: Path) -> None:
    # after a reading that took long, as on a busy machine, the endpoint looks again only 30 s later
    run_dir, deadline = tmp_path / "run", time.monotonic() + 6 * LIMIT
    run_dir.mkdir()
    restarts, goodput, slowest = queries()
    with serving(run_dir) as where, prometheus(tmp_path, where.removeprefix("http://")) as server:
        ask_until(server, "inprocess_build_info", bool, deadline)
        launch(targets.run_train, 3, faults=FAULTS, wrapper=PATIENT | {"run_dir": str(run_dir)}).wait()
        classes = {(("class", "exception"),): 1.0, (("class", "signal"),): 1.0}
        ask_until(server, "sum by (class) (inprocess_restarts_total) > 0", classes.__eq__, deadline)
        # restarts in the last hour: those that happened after Prometheus had first asked
        assert ask_until(server, restarts, lambda found: found.keys() == classes.keys(), deadline)

        def is_goodput(found: dict[Any, float]) -> bool:
            """The live files add what went by after the last event: some percent of a job that takes a second."""
            time = total(read_summary(str(run_dir)))
            if time is None or () not in found:
                return False
            longer = time.seconds + LAST_S
            return time.productive / longer <= found[()] <= (time.productive + LAST_S) / longer

        share = ask_until(server, goodput, is_goodput, deadline)[()]
        assert 0.0 < share < 1.0
        (time_,) = read_summary(str(run_dir))
        seconds = {phase: value for loss in time_.losses for phase, value in loss.phases.items()}
        found = ask_until(server, slowest, bool, deadline)
        assert {dict(labels)["phase"] for labels in found} <= seconds.keys()
        text = get(f"{where}/metrics")
    if PROMTOOL is not None:
        checked = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=text, check=False, capture_output=True, text=True
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    told = json.loads((run_dir / "incidents" / "summary.json").read_text())
    assert (told["format"], told["version"], len(told["jobs"])) == ("inprocess-summary", 1, 1)


SAID = re.compile(r"the call completed after 2 restarts in \d+\.\d s; goodput (\d+\.\d)%")


def accounted(run_dir: Path) -> Accounting:
    trails, _ = read(str(run_dir))
    ((trail, found),) = all_incidents(trails)
    time = account(trail, found)
    assert time is not None
    return time


def test_the_last_line_of_a_call(launch: Any, tmp_path: Path) -> None:
    """The first rank alone says it, and as the report does, which counts the end of the call as productive."""
    faults = {At(1, step=200): Raise(ValueError), At(2, 1, step=200): Kill()}
    options = PATIENT | {"run_dir": str(tmp_path)}
    ranks = launch(targets.run_train, 3, faults=faults, args={"steps": 600}, wrapper=options).wait()
    assert [len(SAID.findall(ranks[rank].log)) for rank in range(3)] == [1, 0, 0]
    time = accounted(tmp_path)
    assert float(SAID.findall(ranks[0].log)[0]) == pytest.approx(time.goodput * 100, abs=5)


def test_the_time_until_a_hang_is_noticed_is_lost(launch: Any, tmp_path: Path) -> None:
    """Not only from the interruption on."""
    hang = {At(1, step=1): Hang()}
    ranks = launch(targets.run_train, 2, faults=hang, wrapper=HASTY | {"run_dir": str(tmp_path)}).wait()
    (said,) = re.findall(r"after 1 restart in (\S+) s; goodput (\S+)%", ranks[0].log)
    assert float(said[0]) > 1.5 and float(said[1]) < 30.0


def test_a_call_without_a_restart_has_no_such_line(launch: Any) -> None:
    ranks = launch(targets.run_train, 2).wait()
    assert not any("goodput" in ranks[rank].log for rank in range(2))


def test_the_last_line_after_the_host_of_the_store_was_lost(launch: Any) -> None:
    """The call goes on over another store, and so does its account."""
    ranks = launch(targets.run_train, 4, faults={At(0, step=1): HostLoss()}, wrapper=BEATING).wait()
    lines = re.findall(r"the call \w+ after (\d) restart", "".join(ranks[rank].log for rank in (1, 2, 3)))
    assert lines == ["1"]


def test_time_that_goes_by_waiting_for_a_replacement(launch: Any, tmp_path: Path) -> None:
    enough = RetryController(min_world_size=3, wait_for_replacement=40)
    options = PATIENT | {"initialize": enough, "run_dir": str(tmp_path)}
    run = launch(targets.run_full, 3, faults={At(1, step=1): Kill()}, wrapper=options)
    run.wait_event("short")
    begin = clock.monotonic()
    run.start_another(1)
    run.wait()
    time = accounted(tmp_path)
    assert 0.05 < time.waiting < clock.monotonic() - begin + 1.0
    lost = sum(seconds for phases in time.lost.values() for seconds in phases.values())
    assert time.seconds == pytest.approx(time.productive + time.starting + time.repeated + time.waiting + lost)
