"""What the library's source does not contain: whatever executes or unpickles data, and files that others may read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_layers import FILES, code, imports, parsed, within

#: `testing` runs the code of the user's own tests, and reads what its own processes wrote into folders of mode 0700
IN_JOBS = [path for path in FILES if not within(path).startswith("testing/")]
#: `doctor` runs the user's script, and jobs of its own for that; no rank of another job imports it. The command may
FOR_RANKS = [path for path in IN_JOBS if not within(path).startswith(("doctor/", "__main__"))]
#: modules whose data is code
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "copyreg", "yaml", "xmlrpc", "tempfile"}
#: functions, by the last parts of their name
CALLS = {
    **dict.fromkeys(("exec", "eval", "__import__", "import_module", "run_module"), "runs what a text says"),
    **dict.fromkeys(("torch.load", "numpy.load", "np.load", "unsafe_load"), "unpickles"),
    **dict.fromkeys(("all_gather_object", "gather_object", "scatter_object_list"), "unpickles what others send"),
    **dict.fromkeys(("broadcast_object_list", "recv_object_list"), "unpickles what others send"),
    **dict.fromkeys(("yaml.load", "yaml.load_all", "full_load", "full_load_all"), "makes objects of what a text names"),
    **dict.fromkeys(("os.system", "os.popen", "getoutput", "getstatusoutput"), "goes through a shell"),
    **dict.fromkeys(("mktemp", "tempnam"), "gives a name that others can guess and take"),
    **dict.fromkeys(("umask", "chmod", "fchmod", "chown", "mkfifo", "mknod"), "changes who may read a file"),
}
#: (file, its path inside the package; call): why it may stay
REASONS = {
    ("call/injection.py", "eval"): "annotations of the user's own function, as Python itself evaluates them",
    ("stores/connecting.py", "import_module"): "StoreSpec.factory: from the training process, never out of a store",
    ("__init__.py", "import_module"): "names from a table in the file",
    ("store.py", "import_module"): "a constant name",
    ("live/__init__.py", "import_module"): "names from a table in the file",
    ("tools/__init__.py", "import_module"): "a constant name",
    ("compat/alias.py", "import_module"): "this library's modules, which the program imports under another name",
    ("compat/stand_in/nvidia_resiliency_ext/__init__.py", "import_module"): "its own name",
    ("system/program.py", "exec"): "the script that the user names, as Python itself runs it",
    ("__main__.py", "import_module"): "names from a table in the file",
    ("launcher/warm_worker.py", "import_module"): "what a worker of this job has imported, or the user names",
    ("system/light_torch.py", "import_module"): "constant names",
    ("system/extensions.py", "import_module"): "names from the table in composition.py",
    ("tools/inject_fault.py", "import_module"): "constant names",
    (
        "live/tree.py",
        "torch.load",
    ): "weights_only=True: torch's unpickler that makes tensors, numbers and containers",
    ("compose.py", "__reduce__"): "a user may pickle the hooks; the library does not",
    ("system/logs.py", "__reduce__"): "a user's handler may pickle a record: as text",
}
#: (file, its path inside the package; module): why it may be imported
IMPORTS = {
    ("doctor/script_runs.py", "pickle"): "what the functions of the user's own script returned to its own user",
    ("interrupt/frames.py", "tempfile"): "the name of its file: no file is made",
    ("doctor/script_runs.py", "tempfile"): "mkdtemp: a folder of mode 0700 for copies of the working directory",
    ("integrations/transformers.py", "tempfile"): "mkdtemp: a folder of mode 0700 with the step in it",
    ("launcher/control_socket.py", "tempfile"): "mkdtemp: a folder of mode 0700 for a socket",
    ("launcher/job.py", "tempfile"): "mkdtemp: a folder of mode 0700 for logs",
    ("launcher/ft_config.py", "yaml"): "safe_load, of a file that the user names",
}
METHODS = {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}


def problems(tree: ast.AST, file: str) -> Iterator[str]:
    """Everything in one file that should not be there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from _imported((alias.name for alias in node.names), file)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported([str(node.module)], file)
        elif isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {text}" for text in _called(node, file))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _defined(node, file)


def _imported(names: Iterator[str] | list[str], file: str) -> Iterator[str]:
    for name in names:
        if (module := name.partition(".")[0]) in MODULES and (file, module) not in IMPORTS:
            yield f"imports {name}"


def _called(call: ast.Call, file: str) -> Iterator[str]:
    name, given = ast.unparse(call.func), {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    for bad, why in CALLS.items():
        if (name == bad or name.endswith(f".{bad}")) and (file, bad) not in REASONS:
            yield f"{name}() {why}"
    if given.get("shell", "False") != "False":
        yield f"{name}() goes through a shell"
    if given.get("weights_only") == "False" or given.get("allow_pickle") == "True":
        yield f"{name}() unpickles"
    mode = ast.unparse(call.args[1]) if len(call.args) > 1 else given.get("mode", "'r'")
    if name in ("open", "io.open") and set(mode) & set("wax+") and given.get("closefd") != "False":
        yield "open() makes a file that the umask alone protects: use os.open(path, ..., 0o600)"


def _defined(function: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> Iterator[str]:
    if function.name in METHODS and (file, function.name) not in REASONS:
        yield f"{function.name} tells a pickle what to call"
    opened = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.open"]
    text = ast.unparse(function)
    for call in opened:
        if "O_CREAT" in text and (len(call.args) < 3 or ast.unparse(call.args[2]) != str(0o600)):
            yield f"{function.name}: os.open() makes a file whose mode is not 0600"
        if "O_EXCL" not in text and not all(flag in text for flag in ("O_NOFOLLOW", "O_NONBLOCK")):
            yield f"{function.name}: os.open() follows a link, or waits for the other end of a pipe"


@pytest.mark.parametrize("path", FOR_RANKS, ids=within)
def test_no_job_imports_what_is_for_tests(path: Path) -> None:
    assert not [name for name in imports(path) if name.partition(".")[0] in ("testing", "doctor")]


@pytest.mark.parametrize("path", IN_JOBS, ids=within)
def test_no_data_is_executed_and_files_are_private(path: Path) -> None:
    assert list(problems(parsed(path), within(path))) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import pickle", "imports pickle"),
        ("from tempfile import mktemp", "imports tempfile"),
        ("x = torch.load(path)", "unpickles"),
        ("load(path, weights_only=False)", "unpickles"),
        ("dist.all_gather_object(found, mine)", "unpickles what others send"),
        ("eval(text)", "runs what a text says"),
        ("importlib.import_module(name)", "runs what a text says"),
        ("subprocess.run(command, shell=True)", "through a shell"),
        ("os.chmod(path, 0o666)", "who may read"),
        ("open(path, 'w')", "umask alone"),
        ("open(path, mode='ab')", "umask alone"),
        ("yaml.load(text)", "makes objects"),
        ("class A:\n    def __reduce__(self): pass", "__reduce__ tells a pickle"),
        ("def f(): os.open(p, os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)", "not 0600"),
        ("def f(): os.open(p, os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)", "not 0600"),
        ("def f(): os.open(p, os.O_RDONLY | os.O_NOFOLLOW)", "waits for the other end"),
    ],
)
def test_each_rule_finds_what_it_is_for(source: str, says: str) -> None:
    assert says in "\n".join(problems(ast.parse(source), "some.py"))


def test_no_reason_without_a_case() -> None:
    sources = {within(path): code(path) for path in FILES}
    for file, name in REASONS:
        assert f"{name}(" in sources[file], (file, name)
    for file, name in IMPORTS:
        assert f"import {name}" in sources[file], (file, name)


def test_a_reason_is_for_one_file_alone() -> None:
    """Not for others of the same name in other folders."""
    for file, name in REASONS:
        text = f"def {name}(self): pass" if name in METHODS else f"{name}(given)"
        text = f"class A:\n    {text}" if name in METHODS else text
        assert not list(problems(ast.parse(text), file))
        assert list(problems(ast.parse(text), f"elsewhere/{file}")), file
        above = file.rpartition("/")[2]  # the file of that name in the package itself, which may have its own reason
        assert list(problems(ast.parse(text), above)) or (above, name) in REASONS, file
