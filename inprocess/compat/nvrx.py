"""Importing this makes ``nvidia_resiliency_ext.inprocess`` and its submodules mean this library, in this process.

The modules are the same objects: ``nvidia_resiliency_ext.inprocess.state.State is inprocess.state.State``. Nothing else
of that package is touched: where it is installed its other modules stay, where it is not they are not found. So import
this first, before anything that imports ``nvidia_resiliency_ext.inprocess``.
"""

from __future__ import annotations

from .alias import install

__all__: list[str] = []

install("nvidia_resiliency_ext.inprocess", "inprocess")
