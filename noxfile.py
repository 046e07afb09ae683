"""Everything CI does, one session each: `nox` runs the short ones, `nox -s tests` one. Plain venv and pip.

The pins are those of constraints.txt, so a run here and a run elsewhere use the same versions.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session, *what: str) -> None:
    session.install("-c", "constraints.txt", *what)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests; arguments go to pytest: `nox -s tests -- tests/unit -k options`."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its formatter."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types: the library in strict mode, and the example as a user's code."""
    install(session, "-e", ".", "mypy")
    session.run("mypy", "--strict", "-p", "inprocess")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, warnings and unresolved references are errors; result in docs/_build/html."""
    install(session, "-e", ".[docs]")
    session.run("sphinx-build", "-W", "-n", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Long: thousands of simulated seeds and hundreds of real restarts; arguments replace the default amounts."""
    install(session, "-e", ".[test]")
    amounts = session.posargs or ["--seeds", "5000", "--restarts", "200"]
    session.run("python", "-m", "tests.soak", *amounts)


@nox.session
def bench(session: nox.Session) -> None:
    """Long: restarts and costs beside other libraries, each in an environment of its own; see docs/performance.md."""
    install(session, "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def partitions(session: nox.Session) -> None:
    """Long: ranks on hosts of their own that are cut off, slow, lossy or paused; arguments go to pytest."""
    install(session, "-e", ".[test]")
    files = ("tests/net/test_partitions.py", "tests/net/long_partitions.py")
    session.run("python", "-m", "pytest", *files, *session.posargs)
