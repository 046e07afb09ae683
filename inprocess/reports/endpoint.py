"""``inprocess metrics RUN_DIR``: serves the metrics of a job to Prometheus, from its run directory.

It is a program of its own, so that nothing of it can harm the training. A thread reads the directory; requests are
answered with what it read last, so neither a slow disk keeps a request, nor many requests cost more than one. Another
thread answers them, and waits for nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inprocess.attribution import one_line
from inprocess.reports.accounting import Accounting
from inprocess.reports.metrics import BUCKETS, Counters, Family, Histogram, families
from inprocess.reports.sources import Sources
from inprocess.system import clock, private_folder
from inprocess.system.http_server import Exchange, HttpServer
from inprocess.system.listening import LOOPBACK, listen_address
from inprocess.system.writing import Writer

__all__ = ["PORT", "main"]

PORT = 9464
#: how often the directory is read (seconds); monitors write as often
EVERY_S = 2.0
#: reading takes at most this share of a core, and the pause between two readings is at most so long (seconds)
SHARE, LONGEST_S = 0.01, 30.0


class MetricsError(Exception):
    """The program cannot start; says which option is wrong, and what to do."""


def main(arguments: Sequence[str]) -> int:
    """Serve until it is ended; returns the exit code: 0, or 2 where it could not begin."""
    parser = argparse.ArgumentParser(
        prog="inprocess metrics", description="Serve the metrics of a job to Prometheus, from its run directory."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory with the events of the job")
    parser.add_argument(
        "--listen",
        default=str(PORT),
        metavar="[HOST:]PORT",
        help=f"default: {LOOPBACK}:{PORT}. Nothing asks who a client is: think before you name another host",
    )
    # of a launcher: make the directory, since no rank has done so yet, and end with the launcher
    parser.add_argument("--of-launcher", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(list(arguments))
    try:
        server = _server(given)
    except MetricsError as error:
        print(f"inprocess metrics: {error}", file=sys.stderr)
        return 2
    if given.of_launcher:
        threading.Thread(target=_end_with_launcher, args=(server,), name="inprocess-end", daemon=True).start()
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _server(given: argparse.Namespace) -> _Server:
    try:
        host, port = listen_address(given.listen)
    except ValueError as error:
        raise MetricsError(f"--listen={given.listen}: {error}") from None
    _library()
    _directory(given)
    snapshot = Snapshot(given.run_dir)
    try:
        server = _Server(_listener(host, port), "inprocess-metrics", _answers(snapshot))
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # the rest is said here
        raise MetricsError(
            f"--listen={given.listen}: {why}: pass an address of this host, and a port that is free (0: any)"
        ) from None
    threading.Thread(target=snapshot.follow, name="inprocess-snapshot", daemon=True).start()
    name = f"[{host}]" if ":" in host else host
    print(f"inprocess metrics: http://{name}:{server.port}/metrics", flush=True)
    return server


def _directory(given: argparse.Namespace) -> None:
    run_dir = given.run_dir
    if given.of_launcher:
        try:
            private_folder.own(run_dir).close()
        except OSError as error:
            raise MetricsError(f"--run-dir={run_dir} cannot be made: {error.strerror or error}") from None
    elif not os.path.isdir(run_dir):
        raise MetricsError(
            f"RUN_DIR={run_dir} is no directory: pass the one that the job was given with Wrapper(run_dir=...), "
            "INPROCESS_RUN_DIR or `inprocess run --run-dir`, or make it first"
        )


def _end_with_launcher(server: _Server) -> None:
    """At the end of standard input, whose other end the launcher holds."""
    while os.read(0, 1 << 10):
        pass
    server.stop()


def _library() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise MetricsError(
            f'it needs the package prometheus-client ({one_line(str(error), 200)}): pip install "inprocess[prometheus]"'
        ) from None
    return prometheus_client


# --- what is served -----------------------------------------------------------------------------------------------


class Snapshot:
    """What was last read of a run directory."""

    def __init__(self, run_dir: str) -> None:
        self._sources, self._counters = Sources(run_dir), Counters()
        #: held while counters are compared with those before
        self._counting = threading.Lock()
        self.read: tuple[list[Accounting], list[dict[str, Any]]] = ([], [])

    def follow(self) -> None:
        """Read it for ever."""
        pause = threading.Event()
        while True:
            begin = clock.monotonic()
            self.refresh()
            pause.wait(min(LONGEST_S, max(EVERY_S, (clock.monotonic() - begin) / SHARE)))

    def refresh(self) -> None:
        """Read it once."""
        try:
            self.read = self._sources.read()
        except Exception as error:  # what was read before stays, and the next reading may succeed
            _printed.put(one_line(repr(error), 500))

    def families(self) -> list[Family]:
        """As they are now."""
        from inprocess import __version__  # noqa: PLC0415  (the package imports no part of it)

        jobs, ranks = self.read
        with self._counting:
            found = families(self._counters.settled(jobs), ranks, clock.wall(), __version__)
            return list(self._counters.kept(found))


class _Collector:
    """What prometheus_client asks for the values."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core  # noqa: PLC0415  (an extra)

        kinds: dict[str, Any] = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        kinds["histogram"] = core.HistogramMetricFamily
        for family in self._snapshot.families():
            metric = kinds[family.kind](family.name, family.help, labels=family.labels)
            for labels, value in family.samples.items():
                if isinstance(value, Histogram):
                    names = [*map(str, BUCKETS), "+Inf"]
                    buckets = [(name, float(count)) for name, count in zip(names, value.counts, strict=True)]
                    metric.add_metric(labels, buckets, sum_value=value.sum)
                else:
                    metric.add_metric(labels, value)
            yield metric


def _answers(snapshot: Snapshot) -> Callable[[bytes], Exchange]:
    library = _library()
    registry = library.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))

    class Answer(Exchange, library.MetricsHandler.factory(registry)):  # type: ignore[misc]
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                try:
                    library.exposition.choose_encoder(self.headers.get("Accept"))
                except Exception:  # it does not expect versions that are none
                    self.send_error(406)
                    return
                super().do_GET()
            elif path == "/status":
                self._give(200, "application/json", json.dumps({"ranks": snapshot.read[1]}))
            else:
                self._give(404, "text/plain", "/metrics: for Prometheus; /status: the ranks, as JSON\n")

        def _give(self, code: int, kind: str, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

    return Answer


class _Server(HttpServer):
    """Whoever reads what it prints may be slow, too."""

    def say(self, text: str) -> None:
        _printed.put(text)


def _listener(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    return socket.create_server(address, family=family)


def _print(text: str) -> None:
    print(f"inprocess metrics: {text}", file=sys.stderr, flush=True)


_printed = Writer("inprocess-print", _print, lambda number, why: f"{number} lines are not here: {why}", "print()")
