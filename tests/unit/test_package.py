"""What is reachable after ``import inprocess``, which imports next to nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import inprocess

ROOT = Path(__file__).parents[2]


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_takes_no_torch_and_reaches_everything() -> None:
    run(
        """
import sys, inprocess
light = {"inprocess", "inprocess.composition", "inprocess.system", "inprocess.system.extensions"}
assert {name for name in sys.modules if name.startswith("inprocess")} == light
assert callable(inprocess.tools.inject_fault.inject_fault)
assert inprocess.rank_assignment.Tree and inprocess.state.State and inprocess.exception.RestartError
assert "torch" not in sys.modules
listed = {inprocess: {"wrap", "Wrapper"}, inprocess.tools: {"inject_fault"}, inprocess.live: {"tree"}}
for module, names in listed.items():
    assert names <= set(dir(module))
for missing in ("inprocess.absent", "inprocess.tools.absent", "inprocess.live.absent"):
    try:
        eval(missing)
    except AttributeError as error:
        assert "absent" in str(error)
    else:
        raise AssertionError(missing)
"""
    )


def test_documented_modules_are_listed() -> None:
    """Those of docs/api.md, without importing what needs torch."""
    page = (ROOT / "docs/api.md").read_text()
    named = set(re.findall(r"auto\w+:: inprocess\.([a-z_]+)", page))
    assert {"abort", "tools", "live", "wait_daemon", "etcd_store"} <= named
    functions = {name for name in named if name in inprocess.__all__}
    assert named - functions <= set(dir(inprocess))


def test_listed_modules_exist() -> None:
    found = {path.stem for path in (ROOT / "inprocess").glob("*.py")} | {
        path.parent.name for path in (ROOT / "inprocess").glob("*/__init__.py")
    }
    assert set(dir(inprocess)) - set(inprocess.__all__) <= found


NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def test_the_parts_that_all_tests_use_need_no_torch() -> None:
    """`nox -s versions` and `nox -s package` run tests without it."""
    run(f"{NO_TORCH}import tests.conftest, inprocess.testing.plugin, inprocess.testing.command")


def test_without_torch() -> None:
    """The light parts work; what needs torch says so."""
    program = f"{NO_TORCH}import inprocess; inprocess.OptionError; inprocess.Wrapper"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    says = f"ModuleNotFoundError: inprocess.wrap needs torch, which is not installed: `{sys.executable} -m pip install"
    assert says in done.stderr
