"""Fuzzing of an env host: its worker mutates what it says, and then has an env built, reset and stepped."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from fuzz.lying_broker import Frames, LyingBroker
from fuzz.mutations import Mutator, peek

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import HeadraceError
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header, encode
from headrace.schemas.messages import Fenced, Message, Reject
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.remote.env_messages import WITHOUT_SEED, EnvHeartbeat, EnvHostWelcome, EnvOrders
from headrace.workers.envs.remote.host.process import EnvHost, learn_spaces

LIES = 60
DEADLINE_S = 60.0
CONFIG = EnvRunnerConfig(env="CartPole-v1", num_envs=2, envs_per_process=2)
COMMANDS = (Command.BUILD, Command.REBUILD, Command.RESET, Command.STEP)
_ORDERS = (Command.BUILD, Command.RESET, Command.STEP, Command.STEP)
"""The orders of an honest worker, one after the other."""


def welcome() -> EnvHostWelcome:
    """The worker's answer to HELLO."""
    return EnvHostWelcome(worker_index=0, num_workers=1, num_envs=2, lease_s=30.0, heartbeat_interval_s=0.05)


def order(life: str, number: int, command: Command, place: int = 0) -> list[Buffer]:
    """The frames of one order."""
    header = EnvOrders(life=life, orders=[(place, number, int(command), WITHOUT_SEED, place)])  # type: ignore[list-item]
    arrays = {"actions": np.ones(1, np.int64)} if command is Command.STEP else None
    return encode(EnvOrders.KIND, header.model_dump(), arrays)


class Schedule:
    """One host and its worker, which lies for a while and then gives its orders as it should."""

    def __init__(self, seed: int, spaces: Spaces, said: Counter[str]) -> None:
        self._mutator = Mutator(seed, "env orders")
        self._spaces = spaces
        self._said = said
        self._left = LIES
        self._life = ""
        self._given = 0
        """Orders that an honest worker has given in this life."""
        self._is_to_end = self._mutator.random.random() < 0.05
        self._done = threading.Event()

    def play(self) -> None:
        """Serve until the worker has had its steps, or the host ends with the error that the worker meant."""
        deadline = time.monotonic() + DEADLINE_S
        with LyingBroker(self._answer) as worker:

            def on_turn() -> None:
                worker.check()
                assert time.monotonic() < deadline, f"the host gives no step: {self._left}, {self._given}"

            host = EnvHost(CONFIG, FleetPlace(worker.endpoint), None, self._spaces)
            try:
                host.serve(self._done, on_turn)
            except HeadraceError as error:
                if not self._is_to_end:
                    raise
                self._said[f"then {type(error).__name__}"] += 1
            finally:
                host.close()

    # -- the worker's thread ------------------------------------------------------------------------------------------

    def _answer(self, kind: MessageKind, header: dict[str, Any], frames: list[bytes]) -> Iterator[Frames]:
        if kind is MessageKind.HELLO:
            self._life, self._given = header["life"], 0
        if self._left:
            yield from self._lies(self._life)
        elif kind is MessageKind.HELLO:
            yield welcome().frames()
        elif header.get("life") == self._life:
            yield from self._go_on(kind, header)
        elif kind is not MessageKind.BYE:  # it took a lie for the welcome of this life
            yield Fenced(detail="x").frames()

    def _go_on(self, kind: MessageKind, header: dict[str, Any]) -> Iterator[Frames]:
        if kind is MessageKind.HEARTBEAT and not self._given:
            yield EnvHeartbeat(life=self._life).frames()
            self._given = 1
        elif kind is MessageKind.HEARTBEAT:
            yield from self._repeat()
            return
        elif kind is MessageKind.ENV_ANSWERS and header["answers"] == [[0, self._given]]:
            assert not header["failures"], header["failures"]
            self._given += 1
        else:
            return
        if self._given > len(_ORDERS):
            self._done.set()
        else:
            yield order(self._life, self._given, _ORDERS[self._given - 1])

    def _repeat(self) -> Iterator[Frames]:
        if self._given <= len(_ORDERS):
            yield order(self._life, self._given, _ORDERS[self._given - 1])

    def _lies(self, life: str) -> Iterator[Frames]:
        """Some lies; then, after the last one, the end of this life, so that the next is without them."""
        rng = self._mutator.random
        for _ in range(min(self._left, 5)):
            self._left -= 1
            frames = self._truth(life)
            kind = decode_header(frames)[0]
            if rng.random() < 0.6:
                frames = self._mutator.message(frames)
            if not _ends(frames):
                self._said[kind.name] += 1
                yield frames
        if not self._left:
            if self._is_to_end:
                yield Reject(code="other_spaces", detail="x").frames()
            yield welcome().frames()
            yield Fenced(detail="x").frames()

    def _truth(self, life: str) -> list[Buffer]:
        rng = self._mutator.random
        if rng.random() < 0.5:
            return order(life, rng.choice((1, 1, 1, 2, 3)), rng.choice(COMMANDS), rng.choice((0, 0, 1)))
        honest: tuple[Message, ...] = (
            welcome(),
            welcome(),
            EnvHeartbeat(life=life),
            Fenced(detail="x"),
            Reject(code="full", detail="x", fatal=False),
        )
        return list(rng.choice(honest).frames())


def _ends(frames: Frames) -> bool:
    """Return whether a message ends the host, as another version of the protocol does."""
    kind, header, why = peek(frames)
    return why == "version_mismatch" or (kind is MessageKind.REJECT and header.get("fatal", True) is True)


@contextmanager
def env_host() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the schedule of a seed, each with a host of its own."""
    spaces = learn_spaces(CONFIG)
    yield lambda seed, said: Schedule(seed, spaces, said).play()
