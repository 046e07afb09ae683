"""`inprocess.compat`: the other library's name means this one; and the runner is what Python itself would be.

Each in a process of its own, since a name stays given. No torch is needed, and none is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import inprocess
from inprocess.compat.runner import USAGE

#: where this library is, which need not be the one that is installed
ROOT = Path(inprocess.__file__).parents[1]

#: in front of each program
SAME = """
import sys, inprocess
def same():
    import nvidia_resiliency_ext.inprocess
    from nvidia_resiliency_ext import inprocess as found
    return found is inprocess is nvidia_resiliency_ext.inprocess is sys.modules["nvidia_resiliency_ext.inprocess"]
"""


def python(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What Python says where warnings are errors; `path` is where a package is installed."""
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, (path, ROOT))))}
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)


def check(program: str, cwd: Path, path: Path | None = None) -> None:
    done = python("-c", SAME + program, cwd=cwd, path=path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.fixture(params=["namespace", "regular"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the other library: as a namespace package, as 0.2 to 0.4 are, and as an ordinary one."""
    package = tmp_path / "site" / "nvidia_resiliency_ext"
    (package / "inprocess").mkdir(parents=True)
    (package / "inprocess" / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (package / "inprocess" / "state.py").write_text("WHOSE = 'theirs'\n")
    (package / "straggler.py").write_text("WHOSE = 'theirs'\n")
    (package / "inprocess" / "utils.py").write_text("WHOSE = 'theirs'\n")
    (package / "launcher.py").write_text("from .inprocess.utils import WHOSE\n")
    (package / "shared_utils").mkdir()
    (package / "shared_utils" / "inject_fault.py").write_text("WHOSE = 'theirs'\n")
    if request.param == "regular":
        (package / "__init__.py").write_text("from . import straggler\n")
    return tmp_path / "site"


def test_modules_are_the_same_objects(tmp_path: Path) -> None:
    check(
        """
import pickle
import inprocess.compat.nvrx
import nvidia_resiliency_ext.inprocess.rank_assignment
import nvidia_resiliency_ext.inprocess.rank_assignment.tree as tree
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.tools import inject_fault
from nvidia_resiliency_ext.inprocess.tools.inject_fault import Fault
assert same()
assert State is inprocess.state.State and isinstance(inprocess.State(), State)
assert nvidia_resiliency_ext.inprocess.rank_assignment is inprocess.rank_assignment
assert tree is inprocess.rank_assignment.tree and tree.Tree is inprocess.rank_assignment.Tree
assert inject_fault is inprocess.tools.inject_fault and inject_fault.Fault is Fault
assert inprocess.state.__spec__.name == "inprocess.state" == inprocess.state.__name__
written = pickle.dumps(State(1, 2), 0)
assert pickle.loads(written) == pickle.loads(written.replace(b"inprocess", b"nvidia_resiliency_ext.inprocess"))
assert "torch" not in sys.modules
""",
        tmp_path,
    )


def test_what_neither_has_is_not_found(tmp_path: Path) -> None:
    check(
        """
import importlib, importlib.util, inprocess.compat.nvrx
for name in ("nvidia_resiliency_ext.straggler", "nvidia_resiliency_ext.inprocess.absent",
             "nvidia_resiliency_ext.inprocess.utils", "nvidia_resiliency_ext.shared_utils.memory", "nvidia_absent"):
    assert importlib.util.find_spec(name) is None
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert (str(error), error.name) == (f"No module named {name!r}", name), error
    else:
        raise AssertionError(name)
assert same()
""",
        tmp_path,
    )


def test_an_installed_one_keeps_its_other_modules(installed: Path, tmp_path: Path) -> None:
    program = """
import inprocess.compat.nvrx
import nvidia_resiliency_ext.straggler
assert nvidia_resiliency_ext.straggler.WHOSE == "theirs" and same()
assert not hasattr(sys.modules["nvidia_resiliency_ext.inprocess"], "WHOSE")
"""
    check(program, tmp_path, installed)


def test_what_its_launcher_needs_of_its_inprocess_stays(installed: Path, tmp_path: Path) -> None:
    program = """
import inprocess.compat.nvrx
import nvidia_resiliency_ext.launcher
from nvidia_resiliency_ext.inprocess import utils
assert utils.WHOSE == nvidia_resiliency_ext.launcher.WHOSE == "theirs" and same()
assert utils.__file__.endswith("nvidia_resiliency_ext/inprocess/utils.py")
"""
    check(program, tmp_path, installed)


def test_modules_beside_its_inprocess_are_theirs_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    program = """
import inprocess.compat.nvrx
from nvidia_resiliency_ext.shared_utils import inject_fault
assert inject_fault.WHOSE == "theirs"
"""
    check(program, tmp_path, installed)


def test_modules_beside_its_inprocess_are_ours_where_it_is_not(tmp_path: Path) -> None:
    program = """
import inprocess.compat.nvrx
from nvidia_resiliency_ext.shared_utils import inject_fault
import nvidia_resiliency_ext.shared_utils.wait_daemon
import inprocess.wait_daemon
assert inject_fault is inprocess.tools.inject_fault and same()
assert nvidia_resiliency_ext.shared_utils.wait_daemon is inprocess.wait_daemon
"""
    check(program, tmp_path)
    done = python("-m", "inprocess.compat", "-m", "nvidia_resiliency_ext.shared_utils.wait_daemon", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x does not exist: the monitor has ended, or was never started\n")


def test_imported_before(installed: Path, tmp_path: Path) -> None:
    """Without its inprocess nothing is lost, and nothing is said."""
    program = """
import nvidia_resiliency_ext
import nvidia_resiliency_ext.straggler as straggler
import inprocess.compat.nvrx
assert nvidia_resiliency_ext.inprocess is inprocess and same()
assert nvidia_resiliency_ext.straggler is straggler and straggler.WHOSE == "theirs"
"""
    check(program, tmp_path, installed)


def test_its_inprocess_imported_before_is_replaced_with_a_warning(installed: Path, tmp_path: Path) -> None:
    program = """
import warnings
import nvidia_resiliency_ext.inprocess.state as theirs
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import inprocess.compat.nvrx
(warning,) = said
assert warning.category is UserWarning
assert "import inprocess.compat.nvrx" in str(warning.message), warning.message
import nvidia_resiliency_ext.inprocess.state
assert nvidia_resiliency_ext.inprocess.state is inprocess.state is not theirs and same()
"""
    check(program, tmp_path, installed)


def test_twice_is_once(tmp_path: Path) -> None:
    check(
        """
import importlib, inprocess.compat.nvrx as nvrx
import nvidia_resiliency_ext.inprocess.state
from inprocess.compat import alias
for _ in range(2):
    before = list(sys.path)
    importlib.reload(nvrx)
    assert sys.path == before and same()
    assert [isinstance(finder, alias.Alias) for finder in sys.meta_path].count(True) == 1
assert isinstance(sys.meta_path[0], alias.Alias) and before.count(alias.STAND_IN) == 1
""",
        tmp_path,
    )


def test_nothing_happens_before_it_is_imported(tmp_path: Path) -> None:
    check(
        """
import importlib.util, inprocess.compat
before = list(sys.path), list(sys.meta_path)
dir(inprocess), dir(inprocess.compat), inprocess.tools.inject_fault
assert (sys.path, sys.meta_path) == before
assert "inprocess.compat.nvrx" not in sys.modules and importlib.util.find_spec("nvidia_resiliency_ext") is None
""",
        tmp_path,
    )


CHILDREN = """
import multiprocessing, sys
from nvidia_resiliency_ext.inprocess.state import State

def child(answers, cls):
    import inprocess
    import nvidia_resiliency_ext.inprocess
    answers.put((nvidia_resiliency_ext.inprocess is inprocess, cls is State is inprocess.State))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers, State))
    process.start()
    process.join()
    print(process.exitcode, answers.get() if process.exitcode == 0 else None)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_in_children_that_begin_anew(method: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILDREN)
    done = python("-m", "inprocess.compat", "script.py", method, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0 (True, True)\n", "")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_in_children_where_the_other_one_is_installed(method: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILDREN + "    import nvidia_resiliency_ext.straggler\n")
    done = python("-m", "inprocess.compat", "script.py", method, cwd=tmp_path, path=installed)
    assert (done.stdout, done.stderr) == ("0 (True, True)\n", "")


# --- the runner: the same as Python without it, to the letter

TELL = """
import sys, __main__
print(sys.argv, sys.path[0], __name__, __file__, __package__, __cached__, getattr(__spec__, "name", None))
print(type(__loader__), __builtins__, vars(__main__) is globals(), "torch" in sys.modules)
"""
FILES = {
    "tell.py": TELL,
    "fails.py": "def f():\n    raise ValueError('a story')\nf()\n",
    "code.py": "import sys\nsys.exit(int(sys.argv[1]))\n",
    "words.py": "raise SystemExit('some words')\n",
    "stops.py": "raise KeyboardInterrupt\n",
    "broken.py": "def f(:\n",
    "chained.py": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('a story') from error\n",
    "hook.py": "import sys\n"
    "sys.excepthook = lambda kind, error, trace: print(trace.tb_frame.f_code.co_filename, trace.tb_next)\n"
    "raise ValueError\n",
    "late.py": "import atexit\natexit.register(lambda: print(__name__, name))\nname = 'known at the end'\n",
    "folder/__main__.py": TELL,
    "package/__init__.py": "",
    "package/part.py": TELL + "raise ValueError('a story')\n",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "link.py").symlink_to(folder / "tell.py")
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", TELL)
    return folder


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("tell.py a -m b --help", 0),
        ("elsewhere/link.py", 0),
        ("fails.py", 1),
        ("code.py 7", 7),
        ("words.py", 1),
        ("stops.py", -2),
        ("broken.py", 1),
        ("chained.py", 1),
        ("hook.py", 1),
        ("late.py", 0),
        ("absent.py", 2),
        ("folder a", 0),
        ("archive.zip a", 0),
        ("package", 1),
        ("-m package.part -m a", 1),
        ("-m tell", 0),
        ("-m absent", 1),
        ("-m package", 1),
        ("-m stops", -2),
    ],
)
def test_as_python_itself(command: str, code: int, files: Path) -> None:
    alone = python(*command.split(), cwd=files)
    here = python("-m", "inprocess.compat", *command.split(), cwd=files)
    assert (here.returncode, here.stdout, here.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert here.returncode == code
    assert bool(here.stderr) == (code not in (0, 7) and command != "hook.py")


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [("", 2, "no script is named"), ("-m", 2, "no module is named"), ("-x a.py", 2, "option -x"), ("--help", 0, "")],
)
def test_usage(command: str, code: int, says: str, tmp_path: Path) -> None:
    done = python("-m", "inprocess.compat", *command.split(), cwd=tmp_path)
    assert done.returncode == code
    assert (done.stderr if code else done.stdout).startswith(USAGE)
    assert says in done.stderr


def test_a_module_under_the_other_name_can_be_run(tmp_path: Path) -> None:
    arguments = ("nvidia_resiliency_ext.inprocess.wait_daemon", "absent.pid")
    done = python("-m", "inprocess.compat", "-m", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "absent.pid" in done.stdout
