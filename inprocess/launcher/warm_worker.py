"""What runs in a warm worker: a spare interpreter that imports what the workers have imported, waits, and becomes one.

It is to be no other worker than one that is started now. So it gives up where an import would leave something that
differs from worker to worker, or that the program decides before it imports:

* A module asks for a variable that this process does not have yet (RANK ...), or that the program itself sets
  (HF_HOME ...), while it is imported. Or it fails, or imports a module of a name that the program has from elsewhere.
  The launcher then starts another interpreter, which leaves out this module (`Spoiled`).
* The program sets a variable that compiled libraries read as they are loaded (or CUDA's driver, where a module has
  initialized that), or there is a CUDA context, which may be that of another rank's GPU (`Unfit`).

It imports slowly, beside the training, and then starts the program of its monitor, which does the same and waits.

    launcher                                 warm worker
                                        <--  {"ready": true, "failed": {...}}, or why not, and it ends
    {"env": {...}} + stdout and stderr  -->
                                        <--  TAKEN
    GO                                  -->  runs the program

Until GO it has done nothing that others see, so the launcher may end it at any time and start a worker as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

from inprocess.attribution import one_line
from inprocess.monitor import starting
from inprocess.system import environment, program, strict_json
from inprocess.system.errors import in_words
from inprocess.system.slow_imports import slow_imports

__all__ = ["GO", "MAX_BYTES", "TAKEN", "main"]

TAKEN, GO = b"taken", b"go"
#: longest message (bytes), and most modules that one names; of how many it says why, and how much (characters)
MAX_BYTES, MAX_NAMED, MAX_FAILED, MAX_WHY = 1 << 16, 200, 20, 200
#: how long its monitor's program may import before it is ready without (seconds)
MONITOR_LIMIT_S = 30.0
PR_SET_PDEATHSIG = 1
#: how the kernel chooses whom it ends where memory runs out, and the value of the first to go
OOM_SCORE, FIRST_TO_GO = "/proc/self/oom_score_adj", "1000"
#: beginnings of variables that compiled libraries read as they are loaded
COMPILED = (
    "BLIS_",
    "GOMP_",
    "GOTO_",
    "KMP_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH_CPP_",
    "TORCH_SHOW_",
)
#: and of those that CUDA's driver reads as it is initialized; what it answers before that
DRIVER, NOT_INITIALIZED = "CUDA_", 3


class Unfit(Exception):
    """Why no such process can become a worker of this program; the message says so."""


class Spoiled(Exception):
    """Why this one cannot: ``modules`` are to be left out by another one."""

    def __init__(self, modules: list[str]) -> None:
        super().__init__(modules)
        self.modules = modules


def main() -> None:
    """The program. Its arguments: descriptors of the control socket and of the plan, ``sys.path[0]``, and the command
    of a worker without the interpreter, which begins with "-u"."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    with open(int(sys.argv[2]), "rb") as file:
        file.seek(0)
        plan = strict_json.parse(file.read(), None, keep_halves=True)
    command = sys.argv[5:]
    is_module = command[0] == "-m"
    sys.orig_argv[1:] = sys.argv[4:]
    sys.argv[:] = command[is_module:]
    end_with_launcher(signal.SIGKILL)
    told = prepared(plan, control)
    score = first_to_go()
    control.send(json.dumps(told).encode())
    become_worker(control, score)
    end_with_launcher(0)
    control.close()
    program.run(program.module(command[1:]) if is_module else program.script(command))


def end_with_launcher(number: int) -> None:
    """The signal that comes when the thread ends that has started this process; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def first_to_go() -> str | None:
    """Let the kernel end this process before a rank, where memory runs out. Returns the value to put back; None: as
    it was. The monitor's program, which is started before, keeps what it has."""
    with contextlib.suppress(OSError, ValueError), open(OOM_SCORE, encoding="ascii") as file:
        before = file.read().strip()
        if int(before) < int(FIRST_TO_GO) and scored(FIRST_TO_GO):
            return before
    return None


def scored(value: str) -> bool:
    """Write it; whether that worked."""
    try:
        fd = os.open(OOM_SCORE, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def prepared(plan: dict[str, Any], control: socket.socket) -> dict[str, object]:
    """Import what the plan says; what there is to say then."""
    try:
        with slow_imports(control.fileno()):
            failed = load(plan)
    except Spoiled as error:
        return {"spoiled": error.modules[:MAX_NAMED]}
    except Unfit as error:
        return {"unfit": str(error)}
    if "torch" in sys.modules:  # else it has no use for one
        starting.prepare(MONITOR_LIMIT_S)
    return {"ready": True, "failed": failed}


def load(plan: dict[str, Any]) -> dict[str, str]:
    """Import the modules of the plan. Returns those of ``--preload`` that cannot be imported, and why. Raises Unfit and
    Spoiled."""
    specific, told, own = plan["specific"], plan["changed"], plan["own"]
    asked: dict[str, str] = {}
    spoiled: set[str] = set()
    foreign = {name for name in own if name in sys.modules}
    with environment.watched({*specific, *told}) as variables:
        for name in plan["names"]:
            if name in sys.modules:
                continue
            if not imports(name):
                spoiled.add(name)
            asked |= {variable: name for variable in variables - asked.keys()}
            now = {name for name in own if name in sys.modules}
            if now != foreign:
                spoiled.add(name)
                foreign = now
    # not looked at as those above: the user knows what they do
    failed = {name: one_line(in_words(error), MAX_WHY) for name in plan["preload"] if (error := failure(name))}
    chosen = {name for name in told if name not in specific and os.environ.get(name) != told[name]}
    read = (*COMPILED, DRIVER) if driver_runs() else COMPILED
    if early := sorted(name for name in chosen if name.startswith(read)):
        raise Unfit(f"the program sets {', '.join(early)}, which libraries read as they are loaded")
    if spoiled := spoiled | {name for variable, name in asked.items() if variable in chosen.union(specific)}:
        raise Spoiled(sorted(spoiled))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise Unfit("a module initializes CUDA while it is imported")
    return dict([*failed.items()][:MAX_FAILED])


def driver_runs() -> bool:
    """Whether CUDA's driver is initialized, as by a module that counts devices: it sees the same ones from then on."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED)


def imports(name: str) -> bool:
    """Import a module; False: it failed half way, and may have left parts."""
    error = failure(name)
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and f"{name}.".startswith(f"{error.name}.")
    return error is None


def failure(name: str) -> BaseException | None:
    """Import a module; what it raises, None where it can be imported."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return error
    return None


def become_worker(control: socket.socket, score: str | None) -> None:
    """Wait until the launcher hands over; variables and streams. Ends the process where it does not, or where it would
    stay the first to go (``score``: see `first_to_go`)."""
    data, fds, _, _ = socket.recv_fds(control, MAX_BYTES, 2)
    if len(fds) != 2 or (score is not None and not scored(score)):
        os._exit(0)
    environment.put_back(strict_json.parse(data, keep_halves=True)["env"])
    for number, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    control.send(TAKEN)
    if control.recv(len(GO)) != GO:
        os._exit(0)
