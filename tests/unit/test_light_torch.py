"""Importing torch's stores alone: it works, it is light, and where it fails torch is imported in full."""

from __future__ import annotations

import subprocess
import sys
import textwrap

USE = """
    from inprocess import store
    server = store.serve("127.0.0.1", 0)
    client = store.TCPStore("127.0.0.1", server.port)
    client.set("key", "value")
    assert client.get("key") == b"value"
    print(kind, len(sys.modules) < 600, hasattr(sys.modules["torch"], "nn"))
"""


def run(program: str) -> str:
    """Run a program in a fresh interpreter; answers what it prints."""
    text = textwrap.dedent("import sys\nfrom inprocess.system import light_torch\n") + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_monitor_s_program_begins_without_torch() -> None:
    assert run("import inprocess.monitor.program\nprint('torch' in sys.modules)") == "False"


def test_the_stores_work_without_the_rest_of_torch() -> None:
    assert run("kind = light_torch.load()\n" + textwrap.dedent(USE)) == "light True False"


def test_the_library_s_store_module_works_on_it() -> None:
    program = """
        light_torch.load()
        from inprocess import store
        from inprocess.protocol.ops import Claim, Read, Wait
        server = store.serve("127.0.0.1", 0)
        connection = store.connect(store.StoreSpec(port=server.port, prefix="p"), 5)
        def verb():
            absent = yield Wait("key", 0.01)
            yield Claim("key", "a")
            return absent, (yield Read("key"))
        print(store.execute(verb(), connection))
    """
    assert run(program) == "(None, b'a')"


def test_a_failure_before_the_stores_are_registered_falls_back_to_all_of_torch() -> None:
    program = """
        real = light_torch._install_stubs
        def broken():
            real()
            raise AttributeError("this version has no such thing")
        light_torch._install_stubs = broken
        kind = light_torch.load()
    """
    assert run(textwrap.dedent(program) + textwrap.dedent(USE)) == "full False True"


def test_a_core_without_the_function_that_registers_falls_back_too() -> None:
    program = """
        import importlib
        class Core:
            pass
        real = importlib.import_module
        def import_module(name):
            module = real(name)
            return Core() if name == "torch._C" else module
        importlib.import_module = import_module
        kind = light_torch.load()
    """
    assert run(textwrap.dedent(program) + textwrap.dedent(USE)) == "full False True"


def test_a_failure_after_that_asks_for_a_new_program() -> None:
    program = """
        light_torch._CLASSES = ("NoSuchStore",)
        try:
            light_torch.load()
        except light_torch.HalfLoaded as error:
            print(error)
    """
    assert "NoSuchStore" in run(program)


def test_full_is_full() -> None:
    assert run("kind = light_torch.load(full=True)\n" + textwrap.dedent(USE)) == "full False True"
