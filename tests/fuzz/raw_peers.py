"""Fuzzing by raw ZMTP: bytes that libzmq never sends, at a broker in a process of its own, and at a server.

A peer sends bursts of messages between pings and other commands, stops in the midst of a frame, and ends by a reset.
libzmq ends its process where it fails on that, and no Python code sees it. The broker has Unix sockets, where each
process of this user is let in; the server has TCP without keys.
"""

from __future__ import annotations

import random
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.schemas.messages import LearnerHello, Message, SupervisorHello, WorkerHello
from headrace.workers.serving.serving_messages import ClientHello
from support.pipeline.delivery import FLEET, broker_process
from support.raw_zmtp import PING, RawZmtp, command, frame, head, memory_of, on_the_wire
from support.serving.other_client import somebody_else
from support.serving.served import LIMITS, Served
from support.waiting import wait_until

MOST_BYTES = 256 << 20
"""Memory of the broker at most, when it has read all messages."""
_LONGEST_BURST = 4000
_COMMANDS = ("PING", "PONG", "READY", "ERROR", "SUBSCRIBE", "CANCEL", "HELLO", "MESSAGE", "x" * 200)


class Sender:
    """The random bytes of one peer. `hello` is the message by which its port knows a peer."""

    def __init__(self, rng: random.Random, hello: bytes, said: Counter[str]) -> None:
        self._rng, self._hello, self._said = rng, hello, said
        self._parts: tuple[Callable[[], bytes], ...] = (
            self._burst,
            self._burst,
            partial(self._few, "pings", lambda: PING * rng.randrange(1, 500)),
            partial(self._few, "commands", self._command),
            partial(self._few, "zeros", lambda: bytes(rng.randrange(1, _LONGEST_BURST))),
            partial(self._few, "noise", lambda: rng.randbytes(rng.randrange(1, 300))),
            partial(self._few, "unfinished frames", lambda: head(rng.choice((0, 1, 1 << 20, 1 << 40)), more=False)),
            partial(self._few, "many frames", lambda: frame(b"", more=True) * rng.randrange(1, 20_000)),
        )

    def bytes(self) -> bytes:
        """Return what to send at once."""
        return b"".join(self._rng.choice(self._parts)() for _ in range(self._rng.randrange(1, 5)))

    def _burst(self) -> bytes:
        count = self._rng.randrange(1, _LONGEST_BURST)
        message = self._rng.choice((self._hello, self._hello, frame(b"garbage", more=False), frame(b"", more=False)))
        self._said["raw: messages"] += count
        between = self._rng.choice((b"", PING, self._command()))
        return (message * self._rng.randrange(1, 6) + between) * (count // 5 + 1)

    def _few(self, kind: str, make: Callable[[], bytes]) -> bytes:
        self._said[f"raw: {kind}"] += 1
        return make()

    def _command(self) -> bytes:
        return command(self._rng.choice(_COMMANDS).encode(), self._rng.randbytes(self._rng.randrange(0, 40)))


def _hellos() -> dict[str, tuple[bytes, list[Message]]]:
    """Return the socket type and the HELLOs of the peers of each port."""
    return {
        "worker": (b"DEALER", [SupervisorHello(fleet_id=FLEET, token="s"), WorkerHello(fleet_id=FLEET, token="w")]),
        "learner": (b"DEALER", [LearnerHello(fleet_id=FLEET, token="l", channel="stream")]),
        "weights": (b"SUB", []),
        "clients": (b"DEALER", [ClientHello(request=0, session="raw", token="own")]),
    }


def _attack(rng: random.Random, endpoint: str, kind: bytes, hello: bytes, said: Counter[str]) -> None:
    with ExitStack() as stack:
        peers = list[RawZmtp]()
        for _ in range(rng.randrange(1, 4)):
            with suppress(AssertionError, OSError):  # a port that is wary admits few, and others try again
                peers.append(stack.enter_context(RawZmtp(endpoint, kind)))
        for peer in peers:
            peer.sock.settimeout(5.0)
            if rng.random() < 0.5:
                peer.send(hello)
        for _ in range(rng.randrange(1, 6)):
            for peer in peers:
                peer.send(Sender(rng, hello, said).bytes())
        for peer in peers:
            way = rng.choice(("reset", "half", "close"))
            with suppress(OSError):
                if way == "reset":
                    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif way == "half":
                    peer.sock.shutdown(socket.SHUT_WR)
            said[f"raw: ended by {way}"] += 1


def _answers(endpoint: str) -> bool:
    """Return whether the port for workers still refuses a learner's HELLO."""
    with suppress(AssertionError, OSError), RawZmtp(endpoint) as peer:
        peer.send(on_the_wire(LearnerHello(fleet_id=FLEET, token="honest", channel="stream").frames()))
        peer.sock.settimeout(5.0)
        return bool(peer.sock.recv(1))
    return False


def _has_read_all(pid: int) -> bool:
    """Return whether the broker sleeps. It also reads what peers have sent that have ended, which waits in libzmq."""
    pause, status = threading.Event(), Path(f"/proc/{pid}/status")
    return not any(pause.wait(0.002) or "State:\tS" not in status.read_text() for _ in range(5))


@contextmanager
def raw_peers() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the peers of a seed. The broker and the server live on, and answer honest peers."""
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(broker_process(run_dir))
        server = stack.enter_context(Served(replace(LIMITS, max_sessions=1000)))
        go_on = stack.enter_context(somebody_else(server))
        state = read_broker_file(run_dir)
        assert state is not None
        endpoints = {role: getattr(state.endpoints, role) for role in Endpoints.model_fields}
        endpoints["clients"] = server.endpoint

        def play(seed: int, said: Counter[str]) -> None:
            rng = random.Random(seed)
            port = rng.choice(list(endpoints))
            kind, hellos = _hellos()[port]
            hello = on_the_wire(rng.choice(hellos).frames()) if hellos else frame(b"\1t", more=False)
            _attack(rng, endpoints[port], kind, hello, said)
            assert broker.popen.poll() is None, (run_dir / "broker.log").read_text()[-2000:]
            if port == "clients":
                go_on()
            else:
                wait_until(lambda: _answers(endpoints["worker"]), "an answer of the broker")
            wait_until(lambda: _has_read_all(broker.popen.pid), "the broker's rest")
            grown = memory_of(broker.popen.pid)
            assert grown < MOST_BYTES, f"the broker has {grown >> 20} MiB"

        yield play
