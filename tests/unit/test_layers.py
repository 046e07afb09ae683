"""The rules of docs/design/architecture.md that a reader of the source can check: rooms, cycles, sizes, store keys, and
what only some files do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "inprocess"
FILES = sorted(PACKAGE.rglob("*.py"))
#: most files in the root, `py.typed` aside, and most lines of a file
ROOT_FILES, LINES = 27, 800
#: modules of the root that keep public names importable, and nothing more; the package itself imports what they name
FACES = {"etcd_store", "learned", "monitor_process", "monitor_thread", "progress_watchdog", "run", "store", "watch"}
#: no clock, socket, thread, torch
PURE = re.compile(
    r"(exception|attribution|state|options|compose|rank_filter|system/strict_json|failover/rules|call/untold_restarts"
    r"|monitor/(policy|configuration|timeouts)|(rank_assignment|protocol)/.*)\.py"
)
#: one of the verbs' keys inside a text: a braced iteration or a fixed word before the slash
KEY = re.compile(
    r"^(\{\}|-?\d+)/(start|end|next|outcome|done|rendezvous|record|abort|wanted)|^(beat|gone)/|^gone#$|^over$|^roster$|^ticket"
)
#: what it does -> (how that looks in a call or an assignment, the files that may), as the architecture document says
ONLY = {
    "connect to a TCPStore": (
        r"TCPStore\(|super\(\)\.__init__, host, number",
        {f"stores/{name}.py" for name in ("tcp", "connecting", "serving")},
    ),
    "make a folder": (
        r"os\.makedirs\(|os\.mkdir\(|\.mkdir\(",
        {"system/private_folder.py", "doctor/script_copy.py", "testing/run.py", "testing/command.py"},
    ),
    "map memory": (r"mmap\.mmap\(", {"monitor/board.py", "monitor/dying.py", "heartbeats/board.py"}),
    "install a signal handler": (
        r"signal\.signal\(|CDLL\(None\)\.signal\(",
        {
            "interrupt/signals.py",
            "kept/asyncio_run.py",
            "system/inherited.py",
            "system/noted_signals.py",
            "system/logs.py",
            "monitor/program.py",
            "launcher/signals.py",
            "tools/inject_fault.py",
            "testing/faults.py",
            "testing/server.py",
        },
    ),
    "change a variable": (
        r"os\.environ\.(update|pop|setdefault|clear)\(|os\.environ\[[^]]+\] = |del os\.environ|putenv\(",
        {"system/environment.py", *(f"launcher/{name}.py" for name in ("job", "meeting", "program"))}
        | {f"testing/{name}.py" for name in ("coverage", "process", "server")},
    ),
}


def within(path: Path) -> str:
    """A file's path inside the package."""
    return path.relative_to(PACKAGE).as_posix()


def rows() -> list[list[str]]:
    """The rooms of the table in the architecture document, one list for each row."""
    (section,) = re.findall(
        r"^## Rooms\n(.*?)^## ", (ROOT / "docs/design/architecture.md").read_text(), re.MULTILINE | re.DOTALL
    )
    cells = re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
    return [[name.rstrip("/") for name in re.findall(r"`([\w/]+)`", cell)] for cell in cells]


@cache
def ranks() -> dict[str, int]:
    """Room -> its row."""
    found = {name: number for number, names in enumerate(rows()) for name in names}
    assert len(found) == sum(map(len, rows())), "a room is in the table twice"
    return found


def room(name: str) -> str:
    """The room of a module, from its name inside the package: the longest beginning that the table has."""
    parts = name.split(".") if name else ["__init__"]
    for end in range(len(parts), 0, -1):
        if (found := "/".join(parts[:end])) in ranks():
            return found
    raise AssertionError(f"{name} has no room in docs/design/architecture.md")


def module(path: Path) -> str:
    """Its name inside the package."""
    return within(path).removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix(".")


MODULES = {module(path): path for path in FILES}


def parsed(path: Path) -> ast.Module:
    """Not kept: the trees of all files together are a million objects, at which each collection would look."""
    return ast.parse(path.read_text(), str(path))


@cache
def code(path: Path) -> str:
    """What the file does, without comments and docstrings."""
    tree = parsed(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


#: how a text names a module of the package, or what is in one
BY_NAME = re.compile(r"inprocess\.([\w.]+)(:\w+)?")


def named(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported by name: constants in calls of import_module, and texts like "module:function"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (match[1] for match in map(_by_name, node.args) if match)
        elif (match := _by_name(node)) and match[2] and match[1] in MODULES:
            yield match[1]


def _by_name(node: ast.AST) -> re.Match[str] | None:
    text = node.value if isinstance(node, ast.Constant) else None
    return BY_NAME.fullmatch(text) if isinstance(text, str) else None


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of the package that a file imports, also inside functions, for type checking, and by name."""
    base = within(path).split("/")[:-1]
    found = set(named(parsed(path)))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "inprocess"]
            found.update(name.partition(".")[2] for name in names)
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else []
            full = [*(above if node.level else []), *filter(None, (node.module or "").split("."))]
            if not node.level:
                if full[0] != "inprocess":
                    continue
                full = full[1:]
            for alias in node.names:
                name = ".".join([*full, alias.name])
                found.add(name if name in MODULES else ".".join(full))
    return frozenset(found - {module(path)})


@pytest.mark.parametrize("path", FILES, ids=within)
def test_imports_point_to_rooms_above(path: Path) -> None:
    own = room(module(path))
    for name in imports(path):
        assert ranks()[room(name)] <= ranks()[own], f"{within(path)} imports {name or 'inprocess'}, from a room below"


def test_no_files_import_each_other_in_a_cycle() -> None:
    """Take away files that import nothing of what is left, until nothing is left."""
    waiting = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    while free := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting


def test_the_package_itself_imports_no_face() -> None:
    assert all((PACKAGE / f"{name}.py").is_file() for name in FACES)
    users = ("", "run", "store")  # of faces; in a `store` there is one, whose library is an extra
    found = {within(path): imports(path) & FACES for path in FILES if module(path) not in users}
    assert not {file: names for file, names in found.items() if names}


def privates(tree: ast.AST) -> set[str]:
    """Private attributes and methods of the classes of a file."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {each.name for one in classes for each in one.body if isinstance(each, ast.FunctionDef)}
    for one in classes:
        targets = [each.target for each in one.body if isinstance(each, ast.AnnAssign)]
        targets += [target for each in one.body if isinstance(each, ast.Assign) for target in each.targets]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        stored = (each for each in ast.walk(one) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
        found |= {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_private_attributes_belong_to_the_classes_of_their_own_file() -> None:
    """`os._exit` and `step._replace` are no attributes of a class of ours; torch's have a table of their own."""
    everywhere = {path: privates(parsed(path)) for path in FILES}
    known = set().union(*everywhere.values()) - {"_exit", "_replace"}
    found = []
    for path, own in everywhere.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and node.attr in known - own:
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls", "threading") and "torch" not in owner:
                    found.append(f"{within(path)}:{node.lineno}: {ast.unparse(node)}")
    inlined = {f"call_wrapper.py: state.{name}" for name in ("_holder", "_lock")}  # two calls fewer in `atomic`
    assert {re.sub(r":\d+", "", each) for each in found} == inlined, found


def test_the_root_has_few_files() -> None:
    assert sum(path.parent == PACKAGE for path in FILES) <= ROOT_FILES


def test_no_file_is_long() -> None:
    lines = {within(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {file: number for file, number in lines.items() if number > LINES}


def test_each_room_says_its_rule() -> None:
    assert not [within(path) for path in FILES if path.name == "__init__.py" and not ast.get_docstring(parsed(path))]


def texts(tree: ast.AST) -> Iterator[str]:
    """String constants, and f-strings with {} for their values; docstrings are not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value


def test_only_the_verbs_know_keys() -> None:
    found = {within(path): {text for text in texts(parsed(path)) if KEY.match(text)} for path in FILES}
    files = {file for file, keys in found.items() if keys}
    assert files
    assert not {file for file in files if not file.startswith(("protocol/keys.py", "protocol/verbs/"))}


def test_only_the_clock_reads_the_time() -> None:
    for path in FILES:
        if within(path) == "system/clock.py" or within(path).startswith("testing/"):  # which is never simulated
            continue
        names = {alias.name for node in ast.walk(parsed(path)) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)}
        assert "time" not in names, f"{within(path)} imports time; use inprocess.system.clock"


@pytest.mark.parametrize("what", ONLY)
def test_what_only_some_files_do(what: str) -> None:
    pattern, files = ONLY[what]
    assert {within(path) for path in FILES if re.search(pattern, code(path))} == files


def test_the_document_names_the_files_that_alone_do_something() -> None:
    text = (ROOT / "docs/design/architecture.md").read_text()
    (section,) = re.findall(r"^## What only some files do\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    for what, (_, files) in ONLY.items():
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {what} "))
        assert {f"{name}.py" for name in re.findall(r"`([\w/]+)`", row)} == files


def test_pure_files_import_no_port() -> None:
    forbidden = {"time", "socket", "threading", "torch", "subprocess", "multiprocessing", "asyncio"}
    pure = [path for path in FILES if PURE.fullmatch(within(path))]
    assert len(pure) > 20
    for path in pure:
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.split(".")[0] for name in names}, f"{within(path)} imports {names}"


def test_threads_are_known_by_their_names() -> None:
    """In a debugger, and in a user's own list of threads. A name that is computed is given by its caller."""

    def is_ours(name: ast.expr) -> bool:
        first = name.values[0] if isinstance(name, ast.JoinedStr) else name
        return not isinstance(first, ast.Constant) or str(first.value).startswith("inprocess-")

    calls = [
        (within(path), node)
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread"
    ]
    names = [(where, [word.value for word in call.keywords if word.arg == "name"]) for where, call in calls]
    assert len(names) > 20
    assert not [where for where, given in names if not given or not is_ours(given[0])]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('import_module("inprocess.live.tree")', ["live.tree"]),
        ('importlib.import_module("torch.nn")', []),
        ('COMMANDS = {"doctor": ("inprocess.doctor.program:main", "about")}', ["doctor.program"]),
        ('"inprocess.store:FileStore is one"', []),
    ],
)
def test_imports_by_name_count(source: str, found: list[str]) -> None:
    assert list(named(ast.parse(source))) == found
