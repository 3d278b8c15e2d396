"""One life of one env host, as the worker sees it: the lanes it has, and its orders. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.schemas.basics.printable import one_line
from headrace.schemas.basics.process_usage import Usage
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.remote.env_messages import NO_SEED, EnvHostHello


@dataclass(slots=True, eq=False)
class HostOrder:
    """An order that a place has not answered.

    It was first sent `since`, and last `sent_at`, in monotonic seconds. `route` is the id of the connection.
    """

    number: int
    command: Command
    seed: int
    since: float
    sent_at: float
    route: bytes


class EnvHostPeer:
    """One life of a host: `num_envs` places, each with one lane or none, and at most one order under way."""

    def __init__(self, hello: EnvHostHello, route: bytes, now: float) -> None:
        self.life = hello.life
        self.name = one_line(f"{hello.host or 'unnamed'}/{hello.pid} ({hello.num_envs} x {hello.env or 'an env'})")
        self.headrace_version = hello.headrace_version
        self.route = route
        """The ROUTER's id of its connection; it changes with each reconnection."""
        self.heard_at = now
        self.lanes: list[int | None] = [None] * hello.num_envs
        """The lane of each place."""
        self.under_way: dict[int, HostOrder] = {}
        self.cpu_s = 0.0
        """Seconds of processor time since its first heartbeat."""
        self.rss_bytes: int | None = None
        """Resident bytes; None before it has told them."""
        self.has_stepped = False
        """True once one of its envs has taken a step."""
        self._cpu_s_at_first: float | None = None
        self._queue: dict[int, tuple[Command, int]] = {}
        self._numbers = [0] * hello.num_envs

    def free_place(self) -> int | None:
        """Return a place without a lane, or None."""
        return self.lanes.index(None) if None in self.lanes else None

    def taken(self) -> list[int]:
        """Return the lanes that have a place."""
        return [lane for lane in self.lanes if lane is not None]

    def ask(self, place: int, command: Command, seed: int = NO_SEED) -> None:
        """Queue `command` for the place. It is sent once the place has answered its current order."""
        self._queue[place] = command, seed

    def hear(self, route: bytes, now: float) -> None:
        """Note that a message came by `route`."""
        self.route, self.heard_at = route, now

    def note_usage(self, told: Usage | None) -> None:
        """Note what the host's processes use, as it tells it."""
        if told is not None:
            self._cpu_s_at_first = told[0] if self._cpu_s_at_first is None else self._cpu_s_at_first
            self.cpu_s, self.rss_bytes = max(self.cpu_s, told[0] - self._cpu_s_at_first), told[1]

    def take_due(self, now: float) -> list[int]:
        """Return the places whose next order can be sent now. It is in `under_way` from now on."""
        if not self._queue:
            return []
        due = [place for place in self._queue if place not in self.under_way]
        for place in due:
            command, seed = self._queue.pop(place)
            self._numbers[place] += 1
            self.under_way[place] = HostOrder(self._numbers[place], command, seed, now, now, self.route)
        return due

    def settle(self, place: int, number: int) -> bool:
        """Note the answer to an order. Return False if it was answered before, or never sent."""
        order = self.under_way.get(place)
        if order is None or order.number != number:
            return False
        del self.under_way[place]
        return True

    def to_repeat(self, at_work_on: Iterable[tuple[int, int]], now: float, patience_s: float) -> list[int]:
        """Return the places whose order, or its answer, seems lost, because the host does not work on it.

        An order seems lost `patience_s` after it was sent, or when the host has come by another route. Repeating an
        order needlessly does no harm.
        """
        known = dict(at_work_on)
        lost = [
            place
            for place, order in self.under_way.items()
            if known.get(place) != order.number and (now - order.sent_at >= patience_s or order.route != self.route)
        ]
        for place in lost:
            self.under_way[place].sent_at, self.under_way[place].route = now, self.route
        return lost

    def overdue(self, limits: Mapping[Command, float], now: float) -> HostOrder | None:
        """Return an order without an answer for longer than its command may take, or None."""
        late = (order for order in self.under_way.values() if now - order.since > limits[order.command])
        return next(late, None)

    @property
    def is_busy(self) -> bool:
        """Return whether an answer is pending."""
        return bool(self.under_way or self._queue)

    @property
    def is_awaited(self) -> bool:
        """Return whether an answer to a step or a reset is pending."""
        return any(order.command in (Command.STEP, Command.RESET) for order in self.under_way.values())
