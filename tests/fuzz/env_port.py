"""Fuzzing of a worker's port for env hosts: the envs of the honest host stay bit-identical; the other hosts lie."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq
from fuzz.mutations import Mutator, peek

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.frames.wire import Buffer, MessageKind, decode, decode_header, encode
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.socket_folder import endpoint_of, new_socket_folder
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.remote.env_messages import EnvAnswers, EnvHeartbeat, EnvHostBye, EnvHostHello
from headrace.workers.envs.remote.host.process import EnvHost, learn_spaces
from support.envs.toy import check_books

LIES, LIES_AT_ONCE = 150, 32
HONEST, LANES = 2, 4
"""Envs of the honest host, which comes first, and of the worker: the others live on hosts that lie."""
DEADLINE_S = 60.0
_SAMPLING: dict[str, Any] = {"env": "CartPole-v1", "seed": 3, "rollout_fragment_length": 8}
_TURNS = {"env_hosts_lease_s": 30.0}
_OWN_PACE = {"remote_env_batch_wait_ms": 0.0, "env_restart_attempts": 1 << 30}
"""No env waits for one on a host that does not answer."""


class Port:
    """A worker whose envs are on hosts, an honest host in a thread, and a worker with the same envs in processes."""

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self._folder = new_socket_folder()
        self.endpoint = endpoint_of(self._folder, "envs-0")
        config = EnvRunnerConfig(num_envs=HONEST, envs_per_process=HONEST, **_SAMPLING)
        self._host = EnvHost(config, FleetPlace(self.endpoint), None, spaces)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._host.serve, args=(self._stopping, lambda: None))
        self._thread.start()
        remote: dict[str, Any] = {"env_placement": "remote", "socket_dir": str(self._folder), **_TURNS, **_OWN_PACE}
        self._remote = SingleAgentEnvRunner(EnvRunnerConfig(num_envs=LANES, **_SAMPLING, **remote), run_uid="fuzz")
        local: dict[str, Any] = {"env_placement": "process", "envs_per_process": LANES, **_OWN_PACE}
        self._local = SingleAgentEnvRunner(EnvRunnerConfig(num_envs=LANES, **_SAMPLING, **local), run_uid="fuzz")
        self._steps: list[deque[bytes]] = [deque() for _ in range(HONEST)]
        self._expected: list[deque[bytes]] = [deque() for _ in range(HONEST)]

    def turn(self) -> None:
        """Sample, and compare what the honest envs lived through with those of the other worker."""
        _note(self._remote, self._steps)
        check_books(self._remote)
        for lane, (steps, expected) in enumerate(zip(self._steps, self._expected, strict=True)):
            while len(expected) < len(steps):
                _note(self._local, self._expected)
            while steps:
                assert steps.popleft() == expected.popleft(), (
                    f"env {lane} of the honest host differs from one of its own"
                )

    def close(self) -> None:
        """End the worker and the host."""
        self._stopping.set()
        self._thread.join()
        self._host.close()
        self._remote.stop()
        self._local.stop()
        shutil.rmtree(self._folder)


def _note(runner: SingleAgentEnvRunner, steps: list[deque[bytes]]) -> None:
    for chunk in runner.sample_fragment():
        if chunk.env_index < HONEST:
            rows = zip(chunk.obs[: len(chunk)], chunk.actions, chunk.rewards, strict=True)
            steps[chunk.env_index].extend(b"".join(np.asarray(part).tobytes() for part in row) for row in rows)


class LyingHost:
    """A host that comes and goes, mutates what it says, and sometimes obeys."""

    def __init__(self, seed: int, port: Port, said: Counter[str]) -> None:
        self._mutator = Mutator(seed, "env host")
        self._port = port
        self._said = said
        self._life = ""
        self._lives: set[str] = set()
        self._orders: deque[dict[str, Any]] = deque(maxlen=20)
        self._obeyed: list[list[Buffer]] = [EnvHeartbeat(life="x").frames()]
        """The last messages of the host, to be sent again."""

    def play(self) -> None:
        """Tell all lies, then leave with all lives that the worker may have believed."""
        with zmq.Context() as context:
            for first in range(0, LIES, LIES_AT_ONCE):
                with context.socket(zmq.DEALER) as sock:
                    sock.linger = 0
                    sock.connect(self._port.endpoint)
                    for _ in range(first, min(first + LIES_AT_ONCE, LIES)):
                        self._lie(sock)
                    self._until_heard(sock)
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.connect(self._port.endpoint)
            for life in sorted(self._lives):
                sock.send_multipart(EnvHostBye(life=life).frames())
                self._until_heard(sock)

    def _lie(self, sock: zmq.Socket[bytes]) -> None:
        frames = self._truth()
        kind = decode_header(frames)[0]
        if self._mutator.random.random() < 0.6:
            frames = self._mutator.message(frames)
        self._note_life(frames)
        self._said[kind.name] += 1
        if frames:
            sock.send_multipart(frames)
        if kind is not MessageKind.HEARTBEAT and self._mutator.random.random() < 0.3:
            self._until_heard(sock)  # and the worker may have given orders

    def _note_life(self, frames: list[Buffer]) -> None:
        kind, header, _ = peek(frames)
        life = header.get("life")
        if kind is MessageKind.HELLO and isinstance(life, str) and 0 < len(life) <= 64:
            self._lives.add(life)

    def _truth(self) -> list[Buffer]:
        rng = self._mutator.random
        if not self._life or rng.random() < 0.1:
            self._life = f"{rng.getrandbits(64):x}"
            self._orders.clear()
            spaces = self._port.spaces.model_dump(mode="json")
            return EnvHostHello(life=self._life, num_envs=rng.choice((1, 2, 5)), spaces=spaces, env="x").frames()
        if self._orders and rng.random() < 0.8:
            self._obeyed = [*self._obeyed[-3:], answers_to(self._orders.popleft(), rng.random() < 0.1)]
            return self._obeyed[-1]
        if rng.random() < 0.5:
            return rng.choice(self._obeyed)
        if rng.random() < 0.9:
            return EnvHeartbeat(life=self._life, under_way=[(0, rng.choice((1, 2, 3)))]).frames()
        return EnvHostBye(life=self._life).frames()

    def _until_heard(self, sock: zmq.Socket[bytes]) -> None:
        """Go on sampling until the worker has heard all that was sent."""
        deadline, is_heard = time.monotonic() + DEADLINE_S, False
        asked_at = 0.0
        while not is_heard:
            if time.monotonic() > asked_at + 1.0:  # again, in case that the connection has ended
                asked_at = time.monotonic()
                sock.send_multipart(EnvHeartbeat(life="nobody").frames())
            self._port.turn()
            while sock.poll(0):
                is_heard |= self._hear(decode(sock.recv_multipart()).header)
            assert time.monotonic() < deadline, "the worker does not answer at its port for env hosts"

    def _hear(self, header: Mapping[str, Any]) -> bool:
        if "orders" in header:
            self._orders.append(dict(header))
        return "has begun" in str(header.get("detail")) or "this life" in str(header.get("detail"))


def answers_to(orders: Mapping[str, Any], is_over: bool) -> list[Buffer]:
    """The frames with which a host answers orders; where `is_over`, each step ends its episode."""
    of: dict[int, list[int]] = {int(command): [] for command in Command}
    for place, _, command, _, _ in orders["orders"]:
        of[command].append(place)
    stepped, began = of[Command.STEP], of[Command.RESET]
    ended = [(place, 1) for place in stepped] if is_over else []
    began = began + (stepped if is_over else [])
    told = EnvAnswers(
        life=orders["life"],
        answers=[(order[0], order[1]) for order in orders["orders"]],
        stepped=stepped,
        ended=ended,
        began=[(place, {"a": 1}) for place in began],
        built=of[Command.BUILD] + of[Command.REBUILD],
        infos=[(place, {"b": [1.5]}) for place in stepped[:1]],
    )
    arrays = {"rewards": np.ones(len(stepped)), "obs": np.zeros((len(stepped), 4), np.float32)} if stepped else {}
    arrays |= {"first": np.zeros((len(began), 4), np.float32)} if began else {}
    return encode(EnvAnswers.KIND, told.model_dump(), arrays)


@contextmanager
def env_port() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the schedule of a seed at one worker's port."""
    port = Port(learn_spaces(EnvRunnerConfig(num_envs=1, **_SAMPLING)))
    try:
        yield lambda seed, said: LyingHost(seed, port, said).play()
    finally:
        port.close()
