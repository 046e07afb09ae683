"""Importing this makes ``nvidia_resiliency_ext.inprocess`` and its submodules mean this library, in this process.

The modules are the same objects: ``nvidia_resiliency_ext.inprocess.state.State is inprocess.state.State``. Nothing else
of that package is touched: where it is installed its other modules stay. So import this first, before anything that
imports ``nvidia_resiliency_ext.inprocess``.
"""

from __future__ import annotations

from .alias import install

__all__: list[str] = []

install(
    "nvidia_resiliency_ext.inprocess",
    "inprocess",
    theirs=["nvidia_resiliency_ext.inprocess.utils"],  # its launcher's rendezvous needs it, since 0.6
    spare={  # modules that 0.5 and 0.6 moved out of its `inprocess`, or put beside it
        "nvidia_resiliency_ext.shared_utils.inject_fault": "inprocess.tools.inject_fault",
        "nvidia_resiliency_ext.shared_utils.wait_daemon": "inprocess.wait_daemon",
    },
)
