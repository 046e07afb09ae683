"""The launcher of one node: torch's elastic agent, with workers that may fail and be replaced one by one.

`Agent._invoke_run` is the loop. It waits until a worker ends, a signal comes or the monitoring interval is over, and
then takes a `_turn`: who ended, what to do about it (`decisions`), who is due to be started again, what other nodes and
the workers themselves want. Everything else is torch's: options, rendezvous, log files, error files, events.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from string import Template
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError
from torch.distributed.elastic.utils.api import macros

from inprocess.attribution import ranges
from inprocess.exception import OptionError, RestartError
from inprocess.launcher.control import ControlServer
from inprocess.launcher.decisions import (
    Fail,
    Respawn,
    RestartAll,
    Rules,
    Situation,
    after_failure,
    no_restart_left,
    why_ended,
)
from inprocess.launcher.ft_config import Settings
from inprocess.launcher.meeting import NodeRendezvous, why_not_met
from inprocess.launcher.metrics import MetricsProgram
from inprocess.launcher.processes import Logs, WorkerLaunch, WorkerPool
from inprocess.launcher.run_dir import RunDirectory
from inprocess.launcher.signals import Signals
from inprocess.launcher.told import Told
from inprocess.launcher.warm import WarmWorkers
from inprocess.launcher.workers import GROW_VARIABLE, RESTART_VARIABLE, WorkerSlot, joining, process_spec, variables
from inprocess.system import clock, procfs
from inprocess.system.descriptors import DescriptorLimits
from inprocess.system.logs import get_logger

__all__ = ["Agent", "JobOver", "NodeExcluded", "Setup"]

log = get_logger(__name__)


#: how late failures are told (seconds)
HOLD_S = 1.0
#: how long workers whose call ended on all ranks may take to come to their own ends (seconds)
OWN_END_S = 5.0
#: a worker that cannot be started again is tried so often, and for so long, while the others go on (seconds)
START_AGAIN_S, START_PATIENCE_S = 5.0, 120.0


class JobOver(Exception):
    """The job ends because a worker or another node wanted it to, or the nodes cannot meet; the message says why."""


class NodeExcluded(Exception):
    """This node leaves the job because a worker wanted it to; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What the agent works with, beside torch's WorkerSpec."""

    rules: Rules
    settings: Settings
    control: ControlServer
    meeting: NodeRendezvous
    run_dir: RunDirectory
    signals: Signals
    metrics: MetricsProgram
    warm: WarmWorkers
    #: of open descriptors, as the launcher was given them
    limits: DescriptorLimits
    #: between the signal to the workers and SIGKILL (seconds)
    grace: float
    start_method: str
    prefix_template: str | None


class Agent(LocalElasticAgent):
    """Starts and watches the workers of this node; `run` returns torch's RunResult.

    Raises JobOver, NodeExcluded, and torch's SignalException for a signal to the launcher.
    """

    def __init__(self, spec: WorkerSpec, setup: Setup, logs_specs: LogsSpecs) -> None:
        super().__init__(
            spec,
            logs_specs,
            start_method=setup.start_method,
            log_line_prefix_template=setup.prefix_template,
        )
        self._shutdown_timeout = setup.grace  # type: ignore[assignment]
        self._setup = setup
        self._process_spec = process_spec(spec, setup.start_method, setup.limits, setup.warm.take)
        self._slots: dict[int, WorkerSlot] = {}
        self._respawned: dict[int, int] = {}
        self._generation, self._joins, self._grows = 0, False, False
        self._checked = clock.monotonic()
        self._told = Told(log.warning, HOLD_S)
        self._done_since: float | None = None

    # --- starting -----------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec, meeting = worker_group.spec, self._setup.meeting

        def meet() -> tuple[Any, list[Worker]]:
            try:
                met = meeting.next()
                self._setup.run_dir.open(meeting.agree)
                workers = joining(met) or self._assign_worker_ranks(met.store, met.rank, met.nodes, spec)
                meeting.settle(workers[0].global_rank)
            except (OptionError, RendezvousGracefulExitError):
                raise
            except (RendezvousError, RestartError, RuntimeError) as error:  # of its store, too
                raise JobOver(f"this node did not meet the others: {why_not_met(error)}") from error
            return met, workers

        with self.record_duration("RENDEZVOUS"):
            met, workers = self._setup.signals.interruptible(meet)
        self._store = worker_group.store = met.store
        self._generation, self._joins, self._grows = met.generation, met.block is not None, met.grows
        worker_group.workers = workers
        worker_group.group_rank, worker_group.group_world_size = met.rank, met.nodes
        worker_group.master_addr, worker_group.master_port = met.host, met.port
        self._setup.metrics.start(met.rank, self._setup.run_dir.path)
        ranks = [worker.global_rank for worker in workers]
        log.info(
            "node %d of %d %s ranks %s of %d; their store is at %s:%d (restart %d of all workers)",
            *(met.rank, met.nodes, "joins a running job with" if self._joins else "starts"),
            *(ranges(ranks), workers[0].world_size, met.host, met.port, met.generation),
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        envs = {worker.local_rank: self._environment(worker_group, worker) for worker in worker_group.workers}
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        logs = Logs(self._logs_specs, envs, self._process_spec.filters)  # adds a variable to each environment
        self._pcontext = pool = WorkerPool(self._process_spec, logs, self._setup.signals)  # type: ignore[assignment]
        self._slots = {
            worker.local_rank: self._slot(worker, envs[worker.local_rank]) for worker in worker_group.workers
        }
        self._done_since = None
        for slot in self._slots.values():
            self._launch(slot)
        return pool.pids()

    def _slot(self, worker: Worker, env: dict[str, str]) -> WorkerSlot:
        spec = self._worker_group.spec
        arguments = tuple(macros.substitute(list(spec.args), str(worker.local_rank)))
        template = Template(self._setup.prefix_template or "")
        prefix = template.safe_substitute(role_name=spec.role, rank=worker.global_rank, local_rank=worker.local_rank)
        return WorkerSlot(worker, WorkerLaunch(arguments, env, prefix), self._respawned.get(worker.local_rank, 0))

    def _environment(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        env = variables(group, worker, self._generation) | self._setup.run_dir.environment()
        if self._joins:
            env[RESTART_VARIABLE] = "1"
        if self._grows:
            env[GROW_VARIABLE] = "1"
        if getattr(group.spec, "virtual_local_rank", False):  # each worker sees one device; newer torch only
            changed: dict[str, Any] = env
            self._set_local_rank_env(changed, worker.local_rank, group.spec)
        return env

    def _launch(self, slot: WorkerSlot) -> None:
        slot.due, slot.doomed, slot.reason, slot.others_until = None, None, "", None
        slot.asked.clear()
        env = {**slot.start.env, **self._setup.control.environment(slot.rank)}
        start = WorkerLaunch(slot.start.args, env, slot.start.prefix)
        restart = slot.respawned if RESTART_VARIABLE in env else 0
        slot.process = self._pool.start(slot.worker.local_rank, restart, start)
        slot.worker.id = slot.process.pid
        self._setup.control.started(slot.rank, slot.process.pid)

    @property
    def _pool(self) -> WorkerPool:
        pool: Any = self._pcontext
        assert isinstance(pool, WorkerPool)
        return pool

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "") -> RunResult:
        self._initialize_workers(self._worker_group)
        while True:
            self._pool.wait(self._pause())
            self._setup.signals.check()
            self._pass_on()
            result = self._turn()
            if result is not None:
                self._worker_group.state = result.state
                return result

    def _pause(self) -> float:
        now, slots = clock.monotonic(), self._slots.values()
        due = [slot.due for slot in slots if slot.due is not None] + self._told.due()
        # a slot without a process keeps what its last one was given
        due += [at for slot in slots if slot.process for at in (slot.doomed, slot.others_until) if at is not None]
        return max(0.0, min([float(self._worker_group.spec.monitor_interval), *(at - now for at in due)]))

    def _turn(self) -> RunResult | None:
        """Look once at everything; the result when it is over."""
        slots = self._slots
        self._told.tell(clock.monotonic())
        # one look at all: if one ended between two looks, the failures of those looked at before would not be reported
        running = {slot.rank for slot in slots.values() if slot.process and slot.process.poll() is None}
        failed = [slot for slot in slots.values() if self._has_failed(slot, running)]
        for slot in failed:
            result = self._handle(slot, failed)
            if result is not None or self._slots is not slots:  # over, or all were restarted
                return result
        self._start_due()
        self._end_overdue()
        self._obey()
        self._open()
        self._setup.warm.tend(self._setup.control.modules())
        self._stuck()
        return self._hear() or self._finished()

    def _pass_on(self) -> None:
        """Signals that would have ended the launcher, to the workers that handle them: the others would die of them."""
        for number in self._setup.signals.for_workers():
            told = [slot for slot in self._slots.values() if slot.process and slot.process.pass_on(number)]
            for slot in told:
                slot.asked.add(number)
            ranks = f"ranks {ranges(slot.rank for slot in told)}, which handle it" if told else "none: none handles it"
            log.warning("%s is passed on to the workers of %s", number.name, ranks)

    def _has_failed(self, slot: WorkerSlot, running: set[int]) -> bool:
        """Whether its process has failed since the last look; ``running``: the ranks whose processes still run."""
        ended = slot.process.ended if slot.process and slot.rank not in running else None
        if ended is None or (ended.failure is not None and running and self._waits_for_others(slot)):
            return False
        control = self._setup.control
        slot.wrapped = slot.wrapped or control.is_wrapped(slot.rank)
        slot.own_store = slot.own_store or control.has_own_store(slot.rank)
        slot.stranded, slot.over = control.is_stranded(slot.rank), control.is_over(slot.rank)
        if slot.over and not slot.reason:
            slot.reason = "after its call had ended with an error on all ranks"
        self._setup.control.ended(slot.rank)
        if ended.failure is None:
            slot.process, slot.done, slot.failure, slot.value = None, True, None, ended.value
            return False
        slot.left = slot.left_as_asked(ended.exitcode)
        if slot.left is not None:
            log.warning("%s has left as asked: %s", slot, slot.left.name)
            slot.process = slot.failure = None
            return False
        slot.failure = ended.failure
        return True

    def _waits_for_others(self, slot: WorkerSlot) -> bool:
        """Where they all end with the same error, each is to come to its own end: it may have something to save."""
        if not self._setup.control.is_over(slot.rank):
            return False
        if slot.others_until is None:
            slot.others_until = clock.monotonic() + OWN_END_S
        return clock.monotonic() < slot.others_until

    def _handle(self, slot: WorkerSlot, failed: list[WorkerSlot]) -> RunResult | None:
        situation = Situation(
            wrapped=slot.wrapped,
            respawned=slot.respawned,
            restarted=self._worker_group.spec.max_restarts - self._remaining_restarts,
            company=not slot.stranded and self._has_company(slot, failed),
        )
        assert slot.failure is not None
        why = f"{slot} failed: {why_ended(slot.failure.exitcode)}" + (f", {slot.reason}" if slot.reason else "")
        slot.process = None
        self._told.again(slot.rank)
        match after_failure(self._setup.rules, situation):
            case Respawn(delay):
                self._respawn_in(delay, slot, why)
            case RestartAll():
                self._restart_all(why)
            case Fail(because):
                log.error("%s. The job has failed: %s", self._told_together(why), because)
                self._setup.meeting.say_over(f"{why} ({because})")
                return self._fail()
        return None

    def _has_company(self, slot: WorkerSlot, failed: list[WorkerSlot]) -> bool:
        """Whether the replacement of a worker would find the job."""
        meeting, control = self._setup.meeting, self._setup.control
        others = [other for other in self._slots.values() if other not in failed]
        if slot.over:  # for the others as well, unless they have called again
            running = [other.rank for other in others if other.process is not None]
            return any(control.is_wrapped(rank) and not control.is_over(rank) for rank in running)
        here = any(self._is_company(other) for other in others)
        elsewhere = any(slot.own_store or control.has_own_store(slot.rank) for slot in self._slots.values())
        return (here or meeting.others) and (elsewhere or meeting.store_answers())

    def _is_company(self, slot: WorkerSlot) -> bool:
        """Whether a replacement of another worker finds the job where this one is."""
        if slot.done:
            return True
        return slot.process is not None and (slot.fresh or self._setup.control.is_wrapped(slot.rank))

    def _respawn_in(self, delay: float, slot: WorkerSlot, why: str) -> None:
        slot.respawned += 1
        self._respawned[slot.worker.local_rank] = slot.respawned
        when = f"in {delay:g} s" if delay else "at once"
        now, limit = clock.monotonic(), self._setup.rules.respawns
        self._told.failed(slot.rank, why, f"it is started again {when}, {slot.respawned} of {limit}", now)
        slot.due = now + delay
        env = {**slot.start.env, RESTART_VARIABLE: str(slot.respawned)}
        slot.start = WorkerLaunch(slot.start.args, env, slot.start.prefix)

    def _restart_all(self, why: str) -> None:
        self._remaining_restarts -= 1
        number = self._worker_group.spec.max_restarts - self._remaining_restarts
        told, limit = self._told_together(why), self._worker_group.spec.max_restarts
        log.warning("%s; all workers are restarted, %d of %d", told, number, limit)
        self._setup.meeting.want_restart(why)
        self._restart_workers(self._worker_group)

    def _fail(self) -> RunResult:
        failures = {slot.rank: slot.failure for slot in self._slots.values() if slot.failure is not None}
        self._stop_workers(self._worker_group)
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _start_due(self) -> None:
        now = clock.monotonic()
        for slot in self._slots.values():
            if slot.due is not None and slot.due <= now:
                self._launch_again(slot, now)
            elif slot.failure is not None and slot.process and self._setup.control.is_wrapped(slot.rank):
                slot.failure = None  # its replacement works: no longer what the job fails of

    def _launch_again(self, slot: WorkerSlot, now: float) -> None:
        """Where that is not possible now, since the disk is full, say, the others need not end for it."""
        try:
            self._launch(slot)
        except (OSError, RestartError) as error:
            slot.failing_since = now if slot.failing_since is None else slot.failing_since
            if now - slot.failing_since > START_PATIENCE_S:
                raise
            slot.due = now + START_AGAIN_S
            words = "%s could not be started again: %s; tried every %g s, for %g s at most"
            log.warning(words, slot, error, START_AGAIN_S, START_PATIENCE_S)
        else:
            slot.failing_since = None

    def _stuck(self) -> None:
        """torch's own check for a process that waits in the kernel (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT). Raises
        JobOver: such a process does not end, and holds its device."""
        limit = getattr(self, "_uninterruptible_state_timeout", 0.0)
        if limit <= 0 or self._check_uninterruptible_state_timeout(self._worker_group, limit) is None:
            return
        waiting = [slot for slot in self._slots.values() if slot.process and _waits_in_kernel(slot.process.pid)]
        who = ", ".join(map(str, waiting)) or "a worker"
        why = f"{who} waited in the kernel for {limit:g} s or more (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)"
        self._setup.meeting.say_over(why)
        raise JobOver(f"the job has ended: {why}")

    def _finished(self) -> RunResult | None:
        """Raises SignalException where all workers have left as a signal asked them to."""
        slots = self._slots.values()
        if not all(slot.done or slot.left for slot in slots):
            return None
        if (number := next(iter(slots)).left) and not any(slot.done for slot in slots):
            raise SignalException(f"all workers have left as asked: {number.name}", sigval=number)
        meeting, now = self._setup.meeting, clock.monotonic()
        if not meeting.alone:
            if self._done_since is None:
                self._done_since = now
                meeting.say_done()
            news = meeting.news()
            late = now - self._done_since > self._exit_barrier_timeout
            if late:
                log.warning("other nodes are not done after %g s; this one leaves", self._exit_barrier_timeout)
            if not late and not meeting.lost and not (news and news.kind == "done"):
                return None
        self._told.all()
        values = {slot.rank: slot.value for slot in self._slots.values()}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    # --- what others want ---------------------------------------------------------------------------------------------

    def _hear(self) -> RunResult | None:
        """What another node wants."""
        news = self._setup.meeting.news()
        if news is None or news.kind == "done":
            return None
        if news.kind == "end":
            raise JobOver(f"the job has ended: {news.why}")
        if news.kind == "few":
            if self._remaining_restarts <= 0:
                raise JobOver(f"the job has ended: {news.why}, and {no_restart_left(self._setup.rules)}")
            self._restart_all(news.why)
            return None
        if news.kind == "restart":  # counts as on the node where the failure was
            self._remaining_restarts = max(0, self._remaining_restarts - 1)
        log.warning("all workers are restarted: %s", news.why)
        self._restart_workers(self._worker_group)
        return None

    def _open(self) -> None:
        """Nodes may join once a worker has told that it is wrapped: such a job can take in others."""
        meeting, control = self._setup.meeting, self._setup.control
        if meeting.to_open and any(control.is_wrapped(slot.rank) for slot in self._slots.values()):
            meeting.open()

    def _end_overdue(self) -> None:
        """End workers that missed their time; they then count as failed."""
        settings, now = self._setup.settings, clock.monotonic()
        self._kill_doomed(now)
        if now - self._checked < settings.workload_check_interval:
            return
        self._checked = now
        slots = {slot.rank: slot for slot in self._slots.values()}
        for late in self._setup.control.overdue():
            slot = slots.get(late.rank)
            if slot and slot.process and not slot.reason:
                slot.reason = late.reason
                name = signal.Signals(settings.rank_termination_signal).name
                log.warning("%s is ended with %s: %s", slot, name, late.reason)
                self._pool.send(slot.worker.local_rank, settings.rank_termination_signal)
                slot.doomed = now + self._setup.grace

    def _kill_doomed(self, now: float) -> None:
        """Kill who took no notice of the signal."""
        for slot in self._slots.values():
            if slot.process and slot.doomed is not None and slot.doomed <= now:
                log.warning("%s is killed", slot)
                self._pool.send(slot.worker.local_rank, signal.SIGKILL)
                slot.doomed = None

    def _obey(self) -> None:
        """What the workers ask for."""
        for request in self._setup.control.requests():
            why = f"rank {request.rank} asked for {request.action}: {request.reason}"
            if request.action == "shutdown_workload":
                self._setup.meeting.say_over(why)
                raise JobOver(f"the job has ended: {why}")
            if request.action == "exclude_this_node":
                raise NodeExcluded(f"this node has left the job: {why}")

    # --- ending -------------------------------------------------------------------------------------------------------

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._setup.meeting.rest()
        self._shutdown()
        for slot in self._slots.values():
            self._setup.control.ended(slot.rank)
            slot.process = slot.due = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None, **_: object) -> None:
        if before := self._told_together():
            log.warning("%s", before)
        for helper in (self._worker_watchdog, self._health_check_server):  # torch's own, where its variables ask for it
            if helper is not None:
                helper.stop()
        self._worker_watchdog = self._health_check_server = None
        if self._pcontext is not None:
            self._pool.close(death_sig, self._setup.grace if timeout is None else timeout)

    def _told_together(self, *why: str) -> str:
        """The failures just before and this one. Who was to be started again alone is not, something else happens."""
        ranks = self._told.ranks()
        for slot in self._slots.values():
            if slot.rank in ranks:
                slot.respawned -= 1
                self._respawned[slot.worker.local_rank] = slot.respawned
        return self._told.together(*why)

    def summary(self) -> str:
        """One line about what happened on this node."""
        alone = ", ".join(f"rank {p.rank}: {p.respawned}" for p in self._slots.values() if p.respawned)
        restarts = self._worker_group.spec.max_restarts - self._remaining_restarts
        done = sum(slot.done for slot in self._slots.values())
        return (
            f"{done} of {len(self._slots)} workers of this node finished; started again alone: {alone or 'none'}; "
            f"restarts of all workers: {restarts}"
        )


def _waits_in_kernel(pid: int) -> bool:
    return procfs.state_of(pid)["state"] == "D"
