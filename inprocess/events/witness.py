"""What a monitor writes down in the run directory: how its rank is, what others need to know, reports of incidents."""

from __future__ import annotations

from collections.abc import Collection

from inprocess.events.incidents import IncidentReports
from inprocess.events.relay import FETCH_S, SEND_S, Relay
from inprocess.events.status_file import StatusFile
from inprocess.monitor.roles import MonitorView
from inprocess.protocol.membership import Membership

__all__ = ["Witness"]


class Witness:
    """Of one monitor; implements `inprocess.monitor.roles.Witness`. Without a run directory it does nothing."""

    def __init__(self, view: MonitorView) -> None:
        config = view.config
        self._at, self._writes = view.at, config.run_dir is not None
        self._relay = Relay(config, view.job.with_store)
        self._status = StatusFile(config, view.board, view.job, view.training, view.post)
        self._incidents = IncidentReports(config.run_dir, config.job, config.call)

    def start(self) -> None:
        self._status.start()

    def decided(self, iteration: int, before: Membership, now: Membership | None, failed: Collection[int]) -> None:
        self._relay.happened(iteration, before, now, failed)

    def on_incident(self, iteration: int, turn: int) -> None:
        if self._writes:
            self._at(SEND_S, self._relay.send)
            self._at(FETCH_S, self._relay.fetch)
        if (seconds := self._incidents.happened(iteration, turn)) is not None:
            self._at(seconds, self._write_report)

    def _write_report(self) -> None:
        if again := self._incidents.write():
            self._at(again, self._write_report)

    def leave(self) -> bool:
        self._relay.leave()
        return self._status.leave()

    def last(self, completed: bool, can_end: bool) -> list[str] | None:
        command = self._incidents.last(completed)
        if can_end or command is None:
            return command
        self._incidents.start(command)
        return None
