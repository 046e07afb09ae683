"""What is checked: the sdist and the wheel of `nox -s package`, or else some that are built here from git's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
#: the variable with the folder of what is built already
FOLDER = "INPROCESS_TESTS_DIST"


class Built(NamedTuple):
    """Both files."""

    sdist: Path
    wheel: Path


def _missing() -> list[str]:
    """What has to be installed before anything can be built without the network."""
    try:
        metadata.version("build")  # an import would also find the folder build/, which older tools leave
    except metadata.PackageNotFoundError:
        return ["build"]
    import build

    requirements = build.ProjectBuilder(ROOT).build_system_requires
    return [each for each in requirements if list(build.check_dependency(each))]


def _build(files: list[str], folder: Path) -> Path:
    """Build from a copy of these files, so that what else lies around is not in it, and nothing is left behind."""
    source, result = folder / "source", folder / "dist"
    for file in files:
        copy = source / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(result)]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return result


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """The files that git has."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a checkout of git, which says which files belong to the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [file for file in listed.split("\0") if file and (ROOT / file).exists()]


@pytest.fixture(scope="session")
def built(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel that was built from it."""
    given = os.environ.get(FOLDER)
    if not given and (missing := _missing()):
        pytest.skip(f"building needs: pip install {' '.join(map(repr, missing))}")
    folder = Path(given) if given else _build(tracked, tmp_path_factory.mktemp("package"))
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)
