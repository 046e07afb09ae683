"""The wheel has the package alone, its metadata says what is true, and it works where it is installed by itself."""

from __future__ import annotations

import configparser
import email
import email.message
import os
import platform
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import inprocess
from tests.package.conftest import ROOT, Built

INFO = f"inprocess-{inprocess.__version__}.dist-info/"
#: those that the docs tell users to install
EXTRAS = {"etcd", "examples", "launcher", "nvml", "testing", "timeline"}


def files(built: Built) -> dict[str, bytes]:
    """All files of the wheel."""
    with zipfile.ZipFile(built.wheel) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def about(built: Built) -> email.message.Message:
    """The metadata."""
    return email.message_from_bytes(files(built)[INFO + "METADATA"])


def test_it_has_the_package_alone(built: Built, tracked: list[str]) -> None:
    names = {name for name in files(built) if not name.startswith(INFO)}
    assert names == {name for name in tracked if name.startswith("inprocess/")}
    assert "inprocess/py.typed" in names


def test_it_has_the_license_and_is_for_every_machine(built: Built) -> None:
    assert files(built)[INFO + "licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert built.wheel.name.endswith("-py3-none-any.whl")


def test_name_and_versions(built: Built) -> None:
    asked = re.search(r'^requires-python = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert asked
    said = about(built)
    assert (said["Name"], said["Version"], said["Requires-Python"]) == ("inprocess", inprocess.__version__, asked[1])


def test_it_needs_torch_and_psutil_alone(built: Built) -> None:
    needed = [each for each in about(built).get_all("Requires-Dist", []) if "extra ==" not in each]
    assert {re.split(r"[<>=!~ ]", each)[0] for each in needed} == {"torch", "psutil"}
    assert set(about(built).get_all("Provides-Extra", [])) >= EXTRAS


def test_entry_points(built: Built) -> None:
    points = configparser.ConfigParser()
    points.read_string(files(built)[INFO + "entry_points.txt"].decode())
    assert {name: dict(points[name]) for name in points.sections()} == {
        "console_scripts": {"inprocess": "inprocess.__main__:main"},
        "pytest11": {"inprocess": "inprocess.testing.plugin"},
    }


def test_an_index_shows_the_readme_without_links_that_lead_nowhere(built: Built) -> None:
    said = about(built)
    text = said.get_payload()
    assert said["Description-Content-Type"] == "text/markdown"
    assert isinstance(text, str)
    assert text.startswith("# inprocess\n")
    targets = re.findall(r"""\]\(([^)\s]+)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=["']([^"']+)""", text, re.MULTILINE)
    assert [each for found in targets for each in found if each and not each.startswith(("https://", "#"))] == []


@pytest.fixture(scope="module")
def alone(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel, and nothing that it needs."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder)
    programs = folder / "bin"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(programs / "python"),
        "install",
        "-q",
        "--no-index",
        "--no-deps",
    ]
    done = subprocess.run([*pip, str(built.wheel)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return programs


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program where the checkout cannot be imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)


def test_installed_alone_it_says_its_version(alone: Path, tmp_path: Path) -> None:
    done = run(tmp_path, alone / "inprocess", "--version")
    said = f"inprocess {inprocess.__version__} (no torch, Python {platform.python_version()})\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_installed_alone_it_says_what_to_install(alone: Path, tmp_path: Path) -> None:
    remedy = f"which is not installed: `{alone / 'python'} -m pip install torch`"
    done = run(tmp_path, alone / "python", "-c", "import inprocess; inprocess.Wrapper")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: inprocess.wrap needs torch, {remedy}"


def test_installed_alone_the_launcher_says_what_to_install(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    done = run(tmp_path, alone / "inprocess", "run", "x.py")
    python = alone / "python"
    remedy = f"torch is not installed for {python}: `{python} -m pip install torch`"
    assert (done.returncode, done.stderr) == (1, f"inprocess run: {remedy}\n")
