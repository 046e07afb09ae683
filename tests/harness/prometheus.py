"""A real Prometheus server on a loopback port. It needs the program `prometheus`, see `MISSING`."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from inprocess.testing.ports import ReservedPort

from .endpoint import ended, get_json
from .needs import is_needed

PROMETHEUS = shutil.which("prometheus")
#: of the same package
PROMTOOL = shutil.which("promtool")
MISSING = "no program prometheus on PATH; on Debian and Ubuntu: apt-get install prometheus"
if PROMETHEUS is None and is_needed("prometheus"):
    raise RuntimeError(f"INPROCESS_TESTS_NEED=prometheus: {MISSING}")
CONFIGURATION = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: training, static_configs: [{{targets: ["{target}"]}}]}}]
"""
#: between two questions (seconds): Prometheus has no event for what it has scraped
AGAIN = 0.1


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """It scrapes ``target``, host and port, every second; its address."""
    assert PROMETHEUS is not None, MISSING
    configuration = folder / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(target=target))
    with ReservedPort() as port, (folder / "prometheus.log").open("wb") as log:
        command = [PROMETHEUS, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port.number}", "--log.level=warn"]
        with ended(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)):
            yield f"http://127.0.0.1:{port.number}"


def ask(server: str, query: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Labels without `instance` and `job` -> value; empty while nobody answers."""
    try:
        told = get_json(f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    except (urllib.error.URLError, ConnectionError):  # it begins
        return {}
    found = {}
    for one in told["data"]["result"]:
        labels = {name: text for name, text in one["metric"].items() if name not in ("instance", "job", "__name__")}
        found[tuple(sorted(labels.items()))] = float(one["value"][1])
    return found


def ask_until(
    server: str, query: str, is_right: Callable[[dict[tuple[tuple[str, str], ...], float]], bool], deadline: float
) -> dict[tuple[tuple[str, str], ...], float]:
    """Ask until the answer is right."""
    while not is_right(found := ask(server, query)):
        assert time.monotonic() < deadline, (query, found)
        time.sleep(AGAIN)
    return found
