"""The publisher of tasks to the fleet: for a curriculum, for domains drawn at random, for exploration by env.

with TaskPublisher.of("runs/mine") as teacher:
    teacher.publish({"level": 3})
    teacher.publish([({"level": 3}, 0.8), ({"level": 4}, 0.2)])  # each episode draws one
    teacher.publish({"epsilon": spread(0.4, 0.4**8, scale="log")})  # each env has its own
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.broker_link import BrokerLink, await_message
from headrace.learner_stub.link.fleet_place import Where, address_sources, as_list, find_fleet
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.stop_event import interrupt_held
from headrace.schemas.credentials.keys import ClientKeys, client_keys
from headrace.schemas.errors import HeadraceError, UnreachableError, refusal
from headrace.schemas.messages import Fenced, Message, Reject, Tasks, TasksAck, TeacherHello, messages_to
from headrace.schemas.peers.fleet_address import SAY_WAITING_S, AddressSource
from headrace.schemas.peers.fleet_place import FleetPlace, broker_fleet_id

log = logging.getLogger("headrace.learner")

_CONTROL = messages_to("teacher")
_RETRY_S = 1.0
_LATELY_S = 3 * _RETRY_S


class TaskPublisher(Closable):
    """Sends tasks to all brokers of a fleet, which keep the newest over restarts and hand it to each worker.

    Between two calls it does nothing, and it needs no `EpisodeStream`. The arguments are those of `WeightPublisher`, as
    are the errors, of `publish` too. `FencedError` says that a newer publisher of tasks has taken over.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        fleet_id: str = "",
        connect_timeout_s: float = 60.0,
        keys: str | Path | ClientKeys | None = None,
        run_dir: str | Path | None = None,
        rendezvous: Where | AddressSource | Sequence[AddressSource] = None,
    ) -> None:
        endpoints, peer_keys = as_list(endpoint), client_keys(keys, "learner")
        process, own = connection.process_token(endpoints), os.urandom(8).hex()
        self._timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        """Held while tasks are published, by one thread after another: each call has a version of its own."""
        sources, count = address_sources(run_dir, rendezvous, len(endpoints)), len(endpoints)
        self._links = [
            BrokerLink(FleetPlace(address, "learner", source, says_waiting=False), peer_keys, process, number)
            for number, (address, source) in enumerate(zip(endpoints, sources, strict=True))
        ]
        hellos = [TeacherHello(token=own, fleet_id=broker_fleet_id(fleet_id, n, count)) for n in range(count)]
        try:
            self._version = max(self._ask(hellos, (1, 0)))
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, where: Where | Sequence[Where] = None, *, connect_timeout_s: float = 60.0, **options: Any) -> Self:
        """Return a publisher to the fleet whose run directory or rendezvous is `where`, as `EpisodeStream.of` does."""
        endpoint, found = find_fleet(where, connect_timeout_s, options)
        return cls(endpoint, **found)

    def publish(self, task: Mapping[str, Any] | Sequence[Any] | None, *, group: int = 0) -> Version:
        """Give each env a task at its next reset. Return its version, which chunks name, once all brokers keep it.

        `task` is one mapping, or a list from which each episode draws one: of mappings, or of (mapping, weight). A
        value may be a rule of `spread`. None, or an empty list: no task. With a `group` of n, n episodes begin with the
        same seed and task.

        Waits for a broker that is away, at most `connect_timeout_s`; some brokers may have the task after an error.
        Raises `EncodeError` for what cannot be published.
        """
        with self._lock, interrupt_held():
            tasks = Tasks.of(task, (self._version[0], self._version[1] + 1), group)
            self._version = tasks.version
            self._ask([tasks] * len(self._links), tasks.version)
        return tasks.version

    __reduce__ = connection.refuse_copy

    def close(self) -> None:
        """Close the connections. The fleet keeps its tasks."""
        for link in self._links:
            link.close()

    def _ask(self, messages: Sequence[Message], wanted: Version) -> list[Version]:
        """Send each broker its message until it has acknowledged `wanted`. Return what each has."""
        had: dict[BrokerLink, Version] = {}
        delays: dict[BrokerLink, tuple[float, str]] = {}
        """The time and the reason of the newest answer that is no acknowledgement."""
        due = dict.fromkeys(self._links, 0.0)
        began = now = connection.now()
        say_at = began + SAY_WAITING_S
        while waiting := [link for link in self._links if link not in had]:
            if now > began + self._timeout_s:
                raise _why(waiting[0], self._timeout_s, now, delays)
            for link in waiting:
                if now > say_at:
                    why = _why(link, round(now - began), now, delays)
                    log.warning("%s (waits for at most %.0f s)", why, self._timeout_s)
                if (now > began + _RETRY_S and link.follow(False, now)) or now >= due[link]:
                    due[link] = now + _RETRY_S if link.send(messages[link.number].frames()) else 0.0
            say_at += SAY_WAITING_S if now > say_at else 0.0
            await_message(waiting, 0.05)
            now = connection.now()
            for link in waiting:
                for answer in _answers(link):
                    link.follow(True, now)
                    if isinstance(answer, str):
                        delays[link] = now, answer
                    elif answer >= wanted:
                        had[link] = answer
        return list(had.values())


def _why(
    link: BrokerLink, waited_s: float, now: float, delays: Mapping[BrokerLink, tuple[float, str]]
) -> HeadraceError:
    """Return the error for a broker that has not acknowledged: it is silent, or has lately said why."""
    at, why = delays.get(link, (-math.inf, ""))
    if now > at + _LATELY_S:
        return link.why_silent(waited_s)
    sentence = f"the broker at {link.name} answers, but has not kept the tasks after {waited_s:g} s: {why}"
    return UnreachableError("broker", link.name, waited_s, sentence=sentence)


def _answers(link: BrokerLink) -> Iterator[Version | str]:
    """Yield the versions that a broker says it has, and why it has no newer one yet. Raises its refusal."""
    for message in link.messages(_CONTROL):
        if isinstance(message, TasksAck):
            yield message.version
        elif isinstance(message, Fenced):
            raise refusal("fenced", message.detail)
        elif isinstance(message, Reject) and not message.fatal:
            yield message.detail
        elif isinstance(message, Reject) and not link.disowns(message):
            raise refusal(message.code, message.detail)
