"""Thousands of seeded schedules of loss, repetition, reordering, restarts and silence between clients and sessions.

A failure prints its seed and variant; `run_schedule(VARIANTS[name], seed)` replays it exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import HeadraceError
from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.serving_messages import (
    ANSWERS,
    ClientHello,
    ClientReject,
    ClientRequest,
    ClientWelcome,
    EpisodeAnswer,
    EpisodeStart,
    EpisodeStep,
)
from headrace.workers.serving.session_records import Reply, ServingLimits, refusal_of
from support.serving.plain_episodes import PlainEpisodes, rule
from support.thorough import schedules

pytestmark = pytest.mark.long

LIMITS = ServingLimits(lease_s=5.0, max_sessions=8, max_episodes=3, remembered_episodes=4)
RETRY_S = 0.5
CLIENTS = 4
EPISODES = 4
"""That each client wants to finish."""


@dataclass(frozen=True)
class Variant:
    """How often what goes wrong, and how many schedules of it run."""

    schedules: int
    drop: float = 0.0
    repeat: float = 0.0
    restarts: int = 0
    silences: int = 0
    delay_s: float = 0.05
    late: float = 0.0
    """Messages that take a hundred times as long, so that others overtake them."""


VARIANTS = {
    "peace": Variant(100),
    "loss": Variant(300, drop=0.2),
    "repetition": Variant(300, repeat=0.4),
    "overtaking": Variant(300, repeat=0.2, late=0.1),
    "restarts": Variant(350, drop=0.05, repeat=0.1, restarts=4),
    "silence": Variant(350, drop=0.05, repeat=0.1, silences=3, late=0.05),
    "all": Variant(400, drop=0.15, repeat=0.2, restarts=3, silences=2, late=0.1),
}


class World:
    """Virtual time, a network that loses and repeats, one server, and clients that want to finish their episodes."""

    def __init__(self, variant: Variant, seed: int) -> None:
        self.variant, self.rng = variant, random.Random(seed)
        self.now, self._order = 0.0, itertools.count()
        self.over = False
        """Clients have vanished."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.table = PlainEpisodes(capacity=8)
        self.sessions = ClientSessions(self.table, {}, lambda call: call(), LIMITS)
        self.clients = [Client(self, index) for index in range(CLIENTS)]
        self.problems: list[str] = []
        self.most = dict.fromkeys(self.sessions.counts(), 0)

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def carry(self, deliver: Callable[[], None]) -> None:
        """Over the network: once, never, or several times, and not in order."""
        for _ in range(1 + (self.rng.random() < self.variant.repeat)):
            if self.rng.random() >= self.variant.drop:
                late = 100 if self.rng.random() < self.variant.late else 1
                self.at(self.rng.expovariate(1 / (self.variant.delay_s * late)), deliver)

    def serve(self, request: ClientRequest, route: Route, observation: Any) -> None:
        try:
            if isinstance(request, EpisodeStep):
                self.sessions.step(request, route, self.now, observation)
            else:
                self.sessions.receive(request, route, self.now)
        except HeadraceError as error:
            route.send(error)
        self._note_counts()

    def _note_counts(self) -> None:
        for name, count in self.sessions.counts().items():
            self.most[name] = max(self.most[name], count)

    def run(self) -> None:
        for client in self.clients:
            self.at(self.rng.random(), client.open)
        for _ in range(self.variant.restarts):
            self.at(self.rng.uniform(0, 10), lambda: self.rng.choice(self.clients).restart())
        for _ in range(self.variant.silences):
            self.at(self.rng.uniform(0, 10), lambda: self.rng.choice(self.clients).fall_silent())
        self._poll()
        while self._events and self.now < 1000.0 and any(client.finished < EPISODES for client in self.clients):
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.over = True
        end = self.now + 20 * LIMITS.lease_s  # what is late may open a session once more
        while self._events and self.now < end:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _poll(self) -> None:
        """The sampler, and the server's clock."""
        self.table.answer_all()
        self.sessions.tick(self.now)
        self._note_counts()
        self.at(1.0 if self.over else self.rng.uniform(0.05, 0.3), self._poll)


@dataclass(frozen=True)
class Route:
    """Where a client's present life listens."""

    client: Client
    life: int
    request: int = field(compare=False)

    def send(self, reply: Reply | Exception) -> None:
        told = refusal_of(reply) if isinstance(reply, HeadraceError) else reply
        assert isinstance(told, Reply)
        self.client.world.carry(lambda: self.client.hear(self.life, self.request, told))


class Client:
    """Plays one episode after another, asking again until it is answered."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.life, self.finished, self.serial = 0, 0, 0
        self.quiet_until = 0.0
        self.request = 0
        self.want: tuple[Callable[..., ClientRequest], dict[str, Any], Any] | None = None
        self.told: dict[str, list[int]] = {}
        """Episode -> the actions it was told."""

    def __hash__(self) -> int:
        return self.index

    def open(self) -> None:
        self._ask(ClientHello, {})

    def restart(self) -> None:
        """Another process of the same name, which knows nothing of the first; it has to wait for its lease."""
        self.life += 1
        self.open()

    def fall_silent(self) -> None:
        self.quiet_until = self.world.now + self.world.rng.uniform(1, 3 * LIMITS.lease_s)

    def _ask(self, kind: Callable[..., ClientRequest], fields: dict[str, Any], observation: Any = None) -> None:
        self.request += 1
        self.want = (kind, fields, observation)
        self._say(self.life, self.request)

    def _say(self, life: int, request: int) -> None:
        """Now, and again until it is answered."""
        if life != self.life or request != self.request or self.want is None or self.world.over:
            return
        kind, fields, observation = self.want
        if self.world.now >= self.quiet_until:
            message = kind(session=f"client {self.index}", token=f"life {self.life}", **fields)
            route = Route(self, self.life, request)
            self.world.carry(lambda: self.world.serve(message, route, observation))
        self.world.at(RETRY_S, lambda: self._say(life, request))

    def hear(self, life: int, request: int, reply: Reply) -> None:
        message = ANSWERS[reply.kind](**reply.fields)
        if life != self.life or request != self.request or self.want is None:
            return
        self.want = None
        if isinstance(message, ClientReject):
            self._refused(message)
        elif isinstance(message, ClientWelcome):
            self._start()
        elif isinstance(message, EpisodeAnswer):
            self._go_on(message, reply.action)

    def _refused(self, reject: ClientReject) -> None:
        if reject.error in ("session_taken", "unknown_session", "no_place"):
            self.world.at(1.0, lambda life=self.life: self.open() if life == self.life else None)
        elif reject.error in ("aborted", "unknown_episode"):  # unknown to the session that came after
            self._start()
        else:
            self.world.problems.append(f"client {self.index} is refused: {reject}")

    def _start(self) -> None:
        self.serial += 1
        self.episode = f"{self.index}/{self.life}/{self.serial}"
        self.length = self.world.rng.randrange(1, 6)
        self.told[self.episode] = []
        self.asked_step = -1
        self._ask(EpisodeStart, {"episode": self.episode})

    def _go_on(self, answer: EpisodeAnswer, action: Any) -> None:
        if answer.episode != self.episode or answer.next_step != self.asked_step + 1:
            self.world.problems.append(f"step {self.asked_step} of {self.episode} got {answer}")
        if action is not None:
            self.told[self.episode].append(int(action))
        self.asked_step = step = answer.next_step
        if step > self.length:
            self.finished += 1
            self._start()
            return
        end = "terminated" if step == self.length else "no"
        fields = {"episode": self.episode, "step": step, "reward": float(step), "end": end}
        self._ask(EpisodeStep, fields, {"obs": np.array([step, self.index], np.float32)})


def run_schedule(variant: Variant, seed: int) -> list[str]:
    """Play one schedule and return what is wrong with it."""
    world = World(variant, seed)
    world.run()
    problems = world.problems
    problems += [f"client {c.index} finished {c.finished}" for c in world.clients if c.finished < EPISODES]
    if any(world.sessions.counts().values()) or world.table.open():
        problems.append(f"left behind: {world.sessions.counts()}, {world.table.open()}")
    each = {"sessions": 1, "episodes": LIMITS.max_episodes, "remembered": LIMITS.remembered_episodes}
    most = {name: CLIENTS * count for name, count in each.items()}
    problems += [f"{name}: {world.most[name]} at once" for name in most if world.most[name] > most[name]]
    for client in world.clients:
        for id, told in client.told.items():
            problems += _judge(client.index, id, told, world)
    return problems


def _judge(index: int, id: str, told: list[int], world: World) -> list[str]:
    episode = world.table.episodes.get(id)
    if episode is None:
        return [f"{id} was acted in, and never begun"] if told else []
    steps = list(range(len(episode.seen)))
    right = [rule([step, index]) for step in steps][: len(episode.actions)]
    problems = [f"{id} saw {episode.seen}"] if episode.seen != steps else []
    problems += [f"{id} was paid {episode.rewards}"] if episode.rewards != steps else []
    problems += [f"{id} did {episode.actions}, not {right}"] if episode.actions != right else []
    problems += [f"{id} was told {told}, not {right}"] if told != right[: len(told)] else []
    if episode.end not in ("terminated", "client_lost"):
        problems.append(f"{id} ended by {episode.end}")
    if episode.end == "terminated" and len(episode.actions) != len(episode.seen) - 1:
        problems.append(f"{id} has {len(episode.seen)} observations and {len(episode.actions)} actions")
    return problems


def test_at_least_two_thousand_schedules_run() -> None:
    assert sum(variant.schedules for variant in VARIANTS.values()) >= 2000


@pytest.mark.parametrize(("name", "seeds"), schedules({name: it.schedules for name, it in VARIANTS.items()}))
def test_every_step_is_taken_once_with_one_answer_under_every_schedule(name: str, seeds: range) -> None:
    variant = VARIANTS[name]
    for seed in seeds:
        problems = run_schedule(variant, seed)
        assert not problems, f"variant {name!r}, seed {seed}: {problems[:3]}"
