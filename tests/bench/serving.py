"""The policy server on loopback: actions a second, and how long a client waits for one, by ZeroMQ and by HTTP.

The limit is a bare ROUTER that gathers what its REQ clients ask, runs the same policy on all that waits at once, and
answers, with no promise at all. A server is one process on either side. All clients are sockets of this one, and each
asks again as soon as it is answered; what they say is written before their turn and answers are only looked at, so that
a client costs the same two frames more or less, whomever it asks.

python tests/bench/run.py --only serving
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
import zmq
from processes import Processes, until_terminated
from table import Row, rows_of
from turns import in_turns

from headrace.schemas.ports import quiet_ports
from headrace.schemas.serving_messages import ClientHello, EpisodeStart, EpisodeStep
from headrace.schemas.serving_settings import ServingSection
from headrace.schemas.spaces import Box, Discrete, Spaces
from headrace.schemas.wire import MessageKind, decode, encode
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.modules import actor_critic

CLIENTS = (1, 8, 64)
MARK = 0.6
OBSERVATION = np.full(4, 0.01, np.float32)
_BODY = b'{"observation": [0.01, 0.01, 0.01, 0.01], "reward": 1.0}'
AHEAD, MOST_AHEAD = 40_000, 10_000
"""Messages of all clients, and of one, that are written ahead."""
KIND_BYTE = 6
"""Of frame 0, as `schemas/wire.py` draws it."""
_START_S = 60.0


def measure(seconds: float, rounds: int) -> list[Row]:
    """Both ways in and the bare echo in turns, for each number of clients."""
    return [row for count in CLIENTS for row in _measure(count, seconds, rounds)]


def _measure(count: int, seconds: float, rounds: int) -> list[Row]:
    case = f"{count} client{'s' * (count > 1)}"
    with Processes() as processes, ExitStack() as stack:
        echo_port, port, http_port = _free_ports(3)
        echo = processes.start(_echo, echo_port)
        server = processes.start(_serve, port, http_port, 2 * count)
        arms = {
            "echo": Asking(Bare(echo_port, count), {"echo": echo}),
            "zeromq": Asking(ByZmq(port, count), {"server": server}),
            "http": Asking(ByHttp(http_port, count), {"server": server}),
        }
        for arm in arms.values():
            stack.callback(arm.way.close)
        turns = in_turns(arms, seconds, rounds)
    rows = rows_of("serving", case, "actions/s", turns, "echo", {"zeromq": MARK})
    for share in (50, 99):
        waits = {name: 1e6 * float(np.percentile(arm.waits_s, share)) for name, arm in arms.items()}
        for name, wait_us in waits.items():
            ratio = wait_us / waits["echo"]
            rows.append(Row("serving", f"{case}: wait, p{share}", name, "us", wait_us, ratio, ratio, ratio))
    return rows


def _free_ports(count: int) -> list[int]:
    free = []
    for port in quiet_ports():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"{count} free ports are not to be found")


# -- who is asked -----------------------------------------------------------------------------------------------------


def _serve(port: int, http_port: int, places: int) -> None:
    """A runner as in a worker, whose samples go nowhere."""
    from headrace.workers.serving.served_env import ServedEnvs

    creator = ServedEnvs(ServingSection(enabled=True, port=port, http_port=http_port), "CartPole-v1", "")
    config = EnvRunnerConfig(env=creator, num_envs=places, seed=0, external_fragment_max_age_s=0.5)
    stopping, sampler = until_terminated(), SingleAgentEnvRunner(config)
    while not stopping.is_set():
        sampler.sample_fragment()
    sampler.stop()


def _echo(port: int) -> None:
    """The same policy, behind nothing."""
    torch.set_num_threads(1)
    module = actor_critic(Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2)))
    act, rng, stopping = module.numpy_act(), np.random.default_rng(0), until_terminated()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"tcp://127.0.0.1:{port}")
        while not stopping.is_set():
            if not router.poll(100):
                continue
            asked = _all_of(router)
            rows = np.frombuffer(b"".join(frames[2] for frames in asked), np.float32).reshape(-1, 4)
            actions = act({"obs": rows}, rng.random((len(asked), module.noise_size), np.float32))["actions"]
            for frames, action in zip(asked, actions, strict=True):
                router.send_multipart([frames[0], b"", action.tobytes()])


def _all_of(router: zmq.Socket[bytes]) -> list[list[bytes]]:
    found = []
    while True:
        try:
            found.append(router.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return found


# -- who asks ---------------------------------------------------------------------------------------------------------


class Way(Protocol):
    """Clients by number, each with a connection of its own."""

    count: int

    def write(self) -> None:
        """Write ahead what will be asked."""

    def ask(self, client: int) -> None: ...
    def answered(self) -> Iterable[int]:
        """Those that have an answer by now, taken; waits for one, but not for ever."""

    def close(self) -> None: ...


class Asking:
    """An arm: `take` is a look at the sockets, and gives how many were answered."""

    def __init__(self, way: Way, pids: Mapping[str, int]) -> None:
        self.way, self.pids = way, pids
        self.waits_s: list[float] = []
        self._asked_at = [0.0] * way.count

    def begin(self) -> None:
        self.way.write()
        for client in range(self.way.count):
            self._ask(client)

    def take(self) -> int:
        taken = 0
        for client in self.way.answered():
            self.waits_s.append(perf_counter() - self._asked_at[client])
            self._ask(client)
            taken += 1
        return taken

    def end(self) -> None:
        """All that was asked is answered."""
        open_ = set(range(self.way.count))
        while open_:
            open_.difference_update(self.way.answered())

    def _ask(self, client: int) -> None:
        self._asked_at[client] = perf_counter()
        self.way.ask(client)


class Written:
    """What `count` clients ask, one message after another, a good part of it written ahead."""

    def __init__(self, count: int, write: Callable[[int, int], Any]) -> None:
        """`write` gives what a client asks in a step."""
        self._write = write
        self._next = [0] * count
        self._ahead: list[deque[Any]] = [deque() for _ in range(count)]

    def fill(self) -> None:
        """Enough for a turn."""
        for client, ahead in enumerate(self._ahead):
            while len(ahead) < min(AHEAD // len(self._ahead), MOST_AHEAD):
                self._add(client)

    def take(self, client: int) -> Any:
        """What the client asks now."""
        if not self._ahead[client]:
            self._add(client)
        return self._ahead[client].popleft()

    def _add(self, client: int) -> None:
        self._ahead[client].append(self._write(client, self._next[client]))
        self._next[client] += 1


class _Sockets:
    """ZeroMQ clients."""

    def __init__(self, port: int, count: int, kind: int) -> None:
        self.count = count
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = [self._context.socket(kind) for _ in range(count)]
        self._numbers = {one: client for client, one in enumerate(self._sockets)}
        for one in self._sockets:
            one.connect(f"tcp://127.0.0.1:{port}")
            self._poller.register(one, zmq.POLLIN)

    def answered(self) -> Iterable[int]:
        found = [self._numbers[one] for one, _ in self._poller.poll(10)]
        for client in found:
            self._take(self._sockets[client].recv_multipart())
        return found

    def _take(self, frames: list[bytes]) -> None:
        assert len(frames[0]) == OBSERVATION.itemsize * 2, frames

    def close(self) -> None:
        self._context.destroy(linger=0)


class Bare(_Sockets):
    """REQ, and nothing but the observation's bytes."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(port, count, zmq.REQ)
        self._said = OBSERVATION.tobytes()

    def write(self) -> None:
        """It is always the same."""

    def ask(self, client: int) -> None:
        self._sockets[client].send(self._said)


class ByZmq(_Sockets):
    """The policy server's own messages; each client's episode goes on for ever."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(port, count, zmq.DEALER)
        self._who = [{"session": f"z{client}", "token": "t"} for client in range(count)]
        self._written = Written(count, self._step)
        self.write = self._written.fill
        for client, one in enumerate(self._sockets):
            one.send_multipart(ClientHello(**self._who[client]).frames())
            assert decode(one.recv_multipart()).kind is MessageKind.WELCOME
            one.send_multipart(EpisodeStart(**self._who[client], episode=f"z{client}").frames())
            self._take(one.recv_multipart())

    def ask(self, client: int) -> None:
        self._sockets[client].send_multipart(self._written.take(client))

    def _step(self, client: int, step: int) -> list[Any]:
        fields = {**self._who[client], "episode": f"z{client}", "step": step, "reward": float(step > 0)}
        return encode(EpisodeStep.KIND, fields, {"obs": OBSERVATION})

    def _take(self, frames: list[bytes]) -> None:
        assert frames[0][KIND_BYTE] == MessageKind.EPISODE_ANSWER, decode(frames)


class ByHttp:
    """HTTP/1.1 on connections that stay, written by hand so that the client costs little."""

    def __init__(self, port: int, count: int) -> None:
        self.count = count
        self._poller = zmq.Poller()
        self._sockets = [_connect(port) for _ in range(count)]
        self._numbers = {one.fileno(): client for client, one in enumerate(self._sockets)}
        self._written = Written(count, self._step)
        self.write = self._written.fill
        for client, one in enumerate(self._sockets):
            self._poller.register(one.fileno(), zmq.POLLIN)
            for path in (f"/v1/sessions/h{client}", f"/v1/sessions/h{client}/episodes/h{client}"):
                one.sendall(_request(path, b"{}"))
                _hear(one)

    def ask(self, client: int) -> None:
        self._sockets[client].sendall(self._written.take(client))

    def _step(self, client: int, step: int) -> bytes:
        body = _BODY if step else _BODY.replace(b"1.0}", b"0.0}")
        return _request(f"/v1/sessions/h{client}/episodes/h{client}/steps/{step}", body)

    def answered(self) -> Iterable[int]:
        found = [self._numbers[int(fd)] for fd, _ in self._poller.poll(10)]
        for client in found:
            _hear(self._sockets[client])
        return found

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _connect(port: int) -> socket.socket:
    """Once the server is there."""
    until: Any = perf_counter() + _START_S
    while True:
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=_START_S)
        except ConnectionRefusedError:
            if perf_counter() > until:
                raise
        else:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return one


def _request(path: str, body: bytes) -> bytes:
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nHeadrace-Client: t\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _hear(one: socket.socket) -> None:
    answer = b""
    while True:
        answer += one.recv(1 << 16)
        head, found, body = answer.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            assert head.startswith(b"HTTP/1.1 200"), answer
            return
