"""One life of one env host, as the worker sees it: which lanes it holds, and what it was ordered. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.schemas.env_messages import NO_SEED, EnvHostHello
from headrace.workers.envs.process.control import Command


@dataclass(slots=True, eq=False)
class HostOrder:
    """What a place was told and has not answered. `sent_at` is in monotonic seconds, `route` where it was sent to."""

    number: int
    command: Command
    seed: int
    sent_at: float
    route: bytes


class EnvHostPeer:
    """`num_envs` places, each with one lane or none, and one order under way at most."""

    def __init__(self, hello: EnvHostHello, route: bytes, now: float) -> None:
        self.life = hello.life
        self.name = f"{hello.host or 'unnamed'}/{hello.pid} ({hello.num_envs} x {hello.env or 'an env'})"
        self.route = route
        """Where its newest message came from; another one after each reconnection."""
        self.heard_at = now
        self.lanes: list[int | None] = [None] * hello.num_envs
        """By place."""
        self.under_way: dict[int, HostOrder] = {}
        self._queue: dict[int, tuple[Command, int]] = {}
        self._numbers = [0] * hello.num_envs

    def free_place(self) -> int | None:
        """A place without a lane."""
        return self.lanes.index(None) if None in self.lanes else None

    def ask(self, place: int, command: Command, seed: int = NO_SEED) -> None:
        """Have the place do this once it has answered what it was told before."""
        self._queue[place] = command, seed

    def hear(self, route: bytes, now: float) -> None:
        """Something came from it."""
        self.route, self.heard_at = route, now

    def take_due(self, now: float) -> list[int]:
        """Places whose next order can go out now; it is in `under_way` from here on."""
        if not self._queue:
            return []
        due = [place for place in self._queue if place not in self.under_way]
        for place in due:
            command, seed = self._queue.pop(place)
            self._numbers[place] += 1
            self.under_way[place] = HostOrder(self._numbers[place], command, seed, now, self.route)
        return due

    def settle(self, place: int, number: int) -> HostOrder | None:
        """The order that is answered herewith; None if it was answered before, or never given."""
        order = self.under_way.get(place)
        if order is None or order.number != number:
            return None
        return self.under_way.pop(place)

    def to_repeat(self, at_work_on: Iterable[tuple[int, int]], now: float, patience_s: float) -> list[int]:
        """Places whose order, or its answer, seems lost: the host is not at work on it, `patience_s` after it was sent
        or once it has come by another route. To repeat one for nothing does no harm."""
        known = dict(at_work_on)
        lost = [
            place
            for place, order in self.under_way.items()
            if known.get(place) != order.number and (now - order.sent_at >= patience_s or order.route != self.route)
        ]
        for place in lost:
            self.under_way[place].sent_at, self.under_way[place].route = now, self.route
        return lost

    @property
    def is_busy(self) -> bool:
        """Whether an answer is to come."""
        return bool(self.under_way or self._queue)

    @property
    def is_awaited(self) -> bool:
        """Whether one to a step or a reset is."""
        return any(order.command in (Command.STEP, Command.RESET) for order in self.under_way.values())
