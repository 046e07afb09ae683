"""Virtual environments for the libraries that are measured beside this one, each with the same torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

#: installed without the dependencies they name: some would bring another torch
PACKAGES = {
    "nvrx": "nvidia-resiliency-ext==0.4.1",
    "torchft": "torchft-nightly==2026.10.26",
}
#: what they need of their dependencies
NEEDS = {
    "nvrx": ["packaging==26.3", "PyYAML==6.0.3", "defusedxml==0.7.1", "nvidia-ml-py==13.615.71", "pynvml==13.0.1"],
    "torchft": [
        "numpy==2.4.6",
        "opentelemetry-api==1.45.2",
        "opentelemetry-sdk==1.45.2",
        "opentelemetry-exporter-otlp-proto-http==1.45.2",
    ],
}


def python(folder: Path, name: str) -> Path:
    """The interpreter of a peer's environment, made on first use; "" is this one."""
    if not name:
        return Path(sys.executable)
    found = folder / name / "bin" / "python"
    if not (folder / name / "ready").exists():
        print(f"installing {name} into {folder / name}", flush=True)
        run = [sys.executable, "-m", "venv", "--clear", str(folder / name)]
        subprocess.run(run, check=True)
        same = [f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "psutil")]
        pip = [str(found), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *same], check=True)
        subprocess.run([*pip, *NEEDS[name]], check=True)
        subprocess.run([*pip, "--no-deps", PACKAGES[name]], check=True)
        (folder / name / "ready").touch()
    return found
