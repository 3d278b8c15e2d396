"""Strangers: peers that no fleet knows, and that send nonsense to every port of a fleet.

    bytes      random bytes, without any handshake
    frames     ZeroMQ messages of random frames, and valid ones cut short
    numbers    valid messages with numbers that no peer could mean, as a worker, a learner or a supervisor

Strangers that send messages show the fleet's token, as any process of this user can. Without it, the fleet would drop
the messages.

No stranger sends a message that only a key could tell from a true one: a plausible HELLO for a slot of the fleet, or a
learner's.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import zmq

from headrace.schemas.credentials.keys import ADMITTED
from headrace.schemas.frames.wire import MessageKind, encode
from headrace.schemas.peers.handshakes import Handshakes

_CONNECTIONS = 4
_MESSAGES = 50
_LINGER_MS = 300
_CONNECT_S = 1.0
LARGE = (2**31 - 1, 2**40 - 1, 2**53 - 1, 2**62, 2**63 - 1)
FIRST_SLOT = 900_000
"""Slots from here on are strangers'."""


def visit(kind: str, endpoints: Mapping[str, str], fleet_id: str, seed: int) -> None:
    """Send this kind of nonsense to each port's endpoint (tcp://HOST:PORT). Skip a port that does not answer."""
    rng = random.Random(f"strangers {seed}")
    for port, endpoint in endpoints.items():
        if kind == "bytes":
            _send_bytes(endpoint, rng)
        else:
            make = _frames if kind == "frames" else _numbers
            _send_messages(endpoint, ADMITTED[port][0], (make(fleet_id, rng) for _ in range(_MESSAGES)))


def _send_bytes(endpoint: str, rng: random.Random) -> None:
    parts = urlsplit(endpoint)
    for _ in range(_CONNECTIONS):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((parts.hostname or "", parts.port or 0), _CONNECT_S) as connection,
        ):
            # About half of the connections start with a ZeroMQ greeting, so that the bytes get past the greeting.
            greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3" if rng.random() < 0.5 else b""
            connection.sendall(greeting + rng.randbytes(rng.randrange(1, 1 << 16)))


def _send_messages(endpoint: str, role: str, messages: Iterator[list[bytes]]) -> None:
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, _LINGER_MS)
            peer.setsockopt(zmq.SNDTIMEO, _LINGER_MS)
            for name, value in Handshakes(endpoint, role, None).options().items():
                peer.setsockopt(getattr(zmq, name), value)
            peer.connect(endpoint)
            for frames in messages:
                with contextlib.suppress(zmq.Again):
                    peer.send_multipart(frames)
    finally:
        context.term()


def _frames(fleet_id: str, rng: random.Random) -> list[bytes]:
    valid = [bytes(frame) for frame in encode(rng.choice(list(MessageKind)), {"fleet_id": fleet_id})]
    match rng.randrange(4):
        case 0:
            return [rng.randbytes(rng.randrange(2000)) for _ in range(rng.randrange(1, 6))]
        case 1:
            return valid[: rng.randrange(1, len(valid) + 1)]
        case 2:
            return [*valid, rng.randbytes(100)]
        case _:
            return [frame[: rng.randrange(len(frame) + 1)] for frame in valid]


def _numbers(fleet_id: str, rng: random.Random) -> list[bytes]:
    """Return a message about a slot far away, or about slot 0 in a life that it never had."""
    large = rng.choice(LARGE)
    slot, incarnation = rng.choice(((FIRST_SLOT + rng.randrange(3), 1), (0, large)))
    totals = dict.fromkeys(("seq", "stepped", "open", "shipped", "env_steps", "episodes"), large)
    place = {"slot": slot, "incarnation": incarnation, "totals": totals}
    settled = {"seq": large, "committed": [large, large]}
    hello = {"role": "worker", "fleet_id": fleet_id, "token": "stranger", **place, "incarnation": large}
    epoch = rng.choice(LARGE[1:])  # a smaller one would be that of a new learner
    messages: list[tuple[MessageKind, dict[str, Any]]] = [
        (MessageKind.HELLO, hello),
        (MessageKind.HELLO, {"role": "worker", "fleet_id": fleet_id, "token": "stranger", "slot": FIRST_SLOT}),
        (MessageKind.HELLO, {"role": "learner", "fleet_id": fleet_id, "token": "stranger", "epoch": epoch}),
        (MessageKind.HEARTBEAT, {**place, "settled": large}),
        (MessageKind.OBITUARY, {**place, "incarnation": large}),
        (MessageKind.COMMIT, {"epoch": large, "position": [{**place, "settled": settled}]}),
        (MessageKind.BYE, place),
    ]
    return [bytes(frame) for frame in encode(*rng.choice(messages))]
