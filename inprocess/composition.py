"""The composition root: who implements the interfaces of the core. The only file that knows both."""

from __future__ import annotations

from inprocess.system import extensions

EXTENSIONS = {
    "Successor": ("inprocess.failover.client:FailoverClient",),
    "StandbyRole": ("inprocess.failover.standby:StandbyRole",),
    "Witness": ("inprocess.events.witness:Witness",),
    "Observer": ("inprocess.events:stream",),
    # in this order an iteration begins; what is garbage is collected in the opposite one
    "Part": (
        "inprocess.heartbeats.launcher:part",
        "inprocess.kept.registry:part",
        "inprocess.hardware.leftovers:part",
        "inprocess.hardware.gpu:part",
        "inprocess.live.open_loaders:part",
    ),
}

extensions.compose(EXTENSIONS)
