"""The base store as a monitor process reaches it: threads, each with its own connection; and the server, where this is
its host.

Nothing of torch is imported before ``load``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from inprocess.exception import BadMessage, OptionError, StoreLost, TimeoutError
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.events import Crashed, Event, HalfLoaded, LinkLost, Serving
from inprocess.protocol import verbs
from inprocess.protocol.ops import Verb
from inprocess.stores import addresses
from inprocess.stores.driver import execute
from inprocess.stores.owner import OWNER_KEY, Owner, find_owner
from inprocess.stores.spec import StoreSpec
from inprocess.system import clock, descriptors, light_torch
from inprocess.system.logs import get_logger

__all__ = ["Connections", "driving"]

T = TypeVar("T")
log = get_logger("inprocess.monitor")
#: pause before a lost connection is made again, while joining (seconds)
RECONNECT_PAUSE_S = 0.05
#: how long a server that has our port may take to say whose it is (seconds)
PROBE_S = 2.0
#: longest try to make a lost connection again, once the job has begun (seconds)
RETRY_PAUSE_S = 1.0


class Connections:
    """What fails in a thread that is started here is posted as an event.

    Args:
        config: of the monitor.
        post: takes an event, from any thread.
        spoiled: told that something in the store cannot be read.
        in_job: whether the job has begun: from then on a store that goes away is lost.
        predecessor: pidfd of the monitor that served before on the same port; -1: none.
    """

    def __init__(
        self,
        config: MonitorConfig,
        post: Callable[[Event], None],
        spoiled: Callable[[BadMessage], None],
        in_job: Callable[[], bool],
        predecessor: int,
    ) -> None:
        self._config, self._post, self._spoiled, self._in_job = config, post, spoiled, in_job
        self._predecessor = predecessor
        #: how to reach the base store, known once torch is imported
        self.spec: StoreSpec
        #: that of the base store, where it is served here
        self.server: Any = None
        #: torch is imported, and the store served
        self.imported = threading.Event()
        #: nobody waits any longer for a store that is not up
        self.give_up = threading.Event()

    def spawn(self, action: Callable[..., object], *args: object) -> None:
        """Start a thread."""
        name = f"inprocess-{action.__name__.strip('_')}"
        # daemon: a thread that waits inside torch cannot be asked to end
        threading.Thread(target=self._guarded, args=(action, *args), name=name, daemon=True).start()

    def _guarded(self, action: Callable[..., object], *args: object) -> None:
        try:
            action(*args)
        except BadMessage as error:
            self._spoiled(error)
        except (StoreLost, TimeoutError) as error:
            self._post(LinkLost(str(error)))
        except OptionError as error:
            self._post(Crashed(str(error), option=True))
        except light_torch.HalfLoaded as error:
            log.warning("%s; starting again with all of torch", error)
            self._post(HalfLoaded())
        except Exception as error:
            name = threading.current_thread().name
            shortage = descriptors.shortage(error)
            log.error("thread %s failed: %s", name, shortage or error, exc_info=not shortage)
            self._post(Crashed(shortage or f"{type(error).__name__}: {error}"))

    def load(self, loaded: Callable[[], None]) -> None:
        """Import torch and serve the store, if this is its host."""
        kind = light_torch.load(full=self._config.needs_full_torch)
        log.info("torch imported (%s)", kind)
        self.spec = StoreSpec.from_json(self._config.store)
        if self._config.serve_port is not None:
            self._serve(self._config.serve_port)
        self.imported.set()
        loaded()

    def _serve(self, port: int) -> None:
        if self._predecessor >= 0:  # the host of the call before, which still has the port
            descriptors.await_readable(self._predecessor, self._config.barrier_timeout)
        descriptors.raise_limit()
        try:  # half of the time for which the rank waits for this
            addresses.await_name(self._config.serve_host, self._config.barrier_timeout / 2)
        except TimeoutError as error:
            raise OptionError(str(error)) from None
        self.server = self._listen(port)
        if self._config.owner:
            self.server.set(OWNER_KEY, self._config.owner)  # at once: who comes waits for it
        if not self.spec.factory and not self.spec.port:
            self.spec = dataclasses.replace(self.spec, port=self.server.port)
        self._post(Serving(self.server.port))

    def _listen(self, port: int) -> Any:
        """Waits for the server of a job that is over; half of the time for which the rank waits for this."""
        from inprocess.stores import serving  # noqa: PLC0415

        deadline = clock.monotonic() + self._config.barrier_timeout / 2
        while True:
            try:
                return serving.serve(self._config.serve_host, port, self._config.bind)
            except serving.PortTaken:
                if not self._config.owner or clock.monotonic() >= deadline:
                    raise
                if not self._is_over(port):  # or it has gone while it was asked; else this raises the same
                    return serving.serve(self._config.serve_host, port, self._config.bind)
            self.give_up.wait(RECONNECT_PAUSE_S)

    def _is_over(self, port: int) -> bool:
        """The job whose server has the port, or that server itself."""
        from inprocess.stores import connecting  # noqa: PLC0415

        spec = StoreSpec(host=self._config.serve_host, port=port)
        try:
            owner = find_owner(connecting.connect(spec, PROBE_S, self.give_up))
        except TimeoutError:
            return True  # it has gone
        except (StoreLost, BadMessage, RuntimeError):
            return False
        return owner is not None and owner.over

    def end(self) -> None:
        """The call is over: say so to processes of a next job, which wait until this server goes."""
        if (server := self.server) is not None and self._config.owner:
            owner = dataclasses.replace(Owner.from_json(self._config.owner), over=True)
            with contextlib.suppress(RuntimeError):
                server.set(OWNER_KEY, owner.to_json())

    def with_store(self, action: Callable[[Any], T]) -> T:
        """Do something over a connection of its own. While joining, a store that goes away may be that of the call
        before on the same port: then begin again."""
        self.imported.wait()
        from inprocess.stores import connecting  # noqa: PLC0415

        while True:
            connection = connecting.connect(self.spec, self._config.barrier_timeout, self.give_up)
            try:
                return action(connection)
            except BadMessage:
                raise
            except StoreLost:
                if self._in_job() or self.give_up.wait(RECONNECT_PAUSE_S):
                    raise

    def again(self, error: StoreLost, member: int) -> Any:
        """A new connection where only this one was lost: a server closes it, too, where a counter holds no number."""
        from inprocess.stores import connecting  # noqa: PLC0415

        try:
            connection = connecting.connect(self.spec, RETRY_PAUSE_S, self.give_up)
            execute(verbs.read_beat(member), connection)
        except BadMessage:
            raise
        except (StoreLost, TimeoutError):
            raise error from None
        return connection


def driving(verb: Callable[[], Verb[T]]) -> Callable[[Any], T]:
    """A verb for `Connections.with_store`: a new one for each connection."""
    return lambda connection: execute(verb(), connection)
