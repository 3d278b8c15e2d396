"""Fuzzing of a policy server with keys: sealed requests of a client that has one, beside an honest client."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import zmq
from fuzz.mutations import NUMBERS, Mutator

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.credentials.keys import CLIENT, ClientKeys, port_keys, read_client_keys
from headrace.schemas.errors.serving import HTTP_STATUS
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers.serving.serving_messages import ANSWERS, ClientHello
from headrace.workers.serving.single_frame import join_frames, split_frame
from support.serving.hostile_requests import Hostile, codes_by_http
from support.serving.other_client import somebody_else
from support.serving.served import LIMITS, Served

MESSAGES, AT_ONCE = 100, 50
ANSWER_MS = 100_000


def by_zmq(seed: int, server: Served, keys: ClientKeys) -> Counter[str]:
    """Return the number of answers by error, and "" for answers without an error. Every message is answered."""
    told, mutator, hostile = Counter[str](), Mutator(seed, "serving"), Hostile(seed, f"session-{seed}")
    with zmq.Context() as context:
        for first in range(0, MESSAGES, AT_ONCE):
            with context.socket(zmq.DEALER) as sock:
                sock.linger = 0
                for name, value in keys.options().items():
                    setattr(sock, name.lower(), value)
                sock.connect(server.endpoint)
                _join(sock, f"session-{seed}")
                for _ in range(first, min(first + AT_ONCE, MESSAGES)):
                    kind, header, arrays = hostile.message()
                    if mutator.random.random() < 0.1:
                        header[mutator.random.choice(("request", "step", "reward"))] = mutator.random.choice(NUMBERS)
                    frames = encode(kind, header, arrays)
                    sock.send_multipart(join_frames(frames) if seed % 2 else frames)
                    assert sock.poll(ANSWER_MS), f"no answer to {kind.name} {header!r:.300}"
                    answer = decode(split_frame(sock.recv_multipart()))
                    assert answer.kind in ANSWERS
                    hostile.heard(answer.header)
                    told[str(answer.header.get("error", ""))] += 1
    return told


def _join(sock: zmq.Socket[bytes], session: str) -> None:
    """Open the session, or come back to it, unless a lie has spoilt that."""
    sock.send_multipart(encode(MessageKind.HELLO, ClientHello(request=0, session=session, token="own").model_dump()))
    assert sock.poll(ANSWER_MS), "no answer to a HELLO"
    sock.recv_multipart()


@contextmanager
def serving() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that sends the requests of a seed to one server, by ZeroMQ or by HTTP."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys"
        make_keys(folder)
        keys = read_client_keys(folder, CLIENT)
        limits = replace(LIMITS, max_sessions=1000)
        server = stack.enter_context(Served(limits, keys=port_keys(str(folder), CLIENT)))
        go_on = stack.enter_context(somebody_else(server, keys))

        def play(seed: int, said: Counter[str]) -> None:
            if seed % 3:
                told, way = by_zmq(seed, server, keys), "ZeroMQ"
            else:
                told, way = codes_by_http(Hostile(seed, f"session-{seed}"), server.url, MESSAGES, go_on), "HTTP"
            assert set(told) <= {"", *HTTP_STATUS}, told
            said.update({f"{way}: {code or 'taken'}": count for code, count in told.items()})
            go_on()

        yield play
