"""Virtual environments for the libraries that are measured beside this one, each with the same torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

#: what pip installs, without the dependencies these packages name: some would bring another torch
PEERS = {
    "nvrx": ["nvidia-resiliency-ext==0.4.1", "packaging", "PyYAML", "defusedxml", "nvidia-ml-py", "pynvml"],
    "torchft": ["torchft-nightly"],
}
#: with their dependencies
COMMON = ["psutil"]


def python(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment, made on first use; "" is this one."""
    if not name:
        return Path(sys.executable)
    found = folder / name / "bin" / "python"
    if not (folder / name / "ready").exists():
        print(f"installing {name} into {folder / name}", flush=True)
        run = [sys.executable, "-m", "venv", "--clear", str(folder / name)]
        subprocess.run(run, check=True)
        torch = "torch==" + version("torch").partition("+")[0]
        pip = [str(found), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, torch, *COMMON], check=True)
        subprocess.run([*pip, "--no-deps", *PEERS[name]], check=True)
        (folder / name / "ready").touch()
    return found
