"""Fuzzing of policy servers: sealed and damaged requests by ZeroMQ, JSON and bytes by HTTP, beside honest clients.

One server is of one agent and takes clients with a key; the other is of several agents, of whom it knows two.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import zmq
from fuzz.mutations import NUMBERS, Mutator

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.credentials.keys import CLIENT, ClientKeys, port_keys, read_client_keys
from headrace.schemas.errors.serving import HTTP_STATUS
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ANSWERS, ClientHello
from headrace.workers.serving.single_frame import join_frames, split_frame
from support.serving.hostile_requests import Hostile, codes_by_http
from support.serving.other_client import somebody_else
from support.serving.raw_http import HEALTH, RawHttp, head
from support.serving.served import LIMITS, Served
from support.serving.served_agents import rule, served_agents
from support.waiting import TIMEOUT_S

MESSAGES, AT_ONCE = 200, 20
ANSWER_MS = 100_000


class HostileAgents(Hostile):
    """A `Hostile` client whose steps are of several agents. The server does not know the agent "green"."""

    def message(self) -> tuple[MessageKind, dict[str, Any], dict[str, Any]]:
        kind, header, arrays = super().message()
        if kind is not MessageKind.EPISODE_STEP or self._rng.random() < 0.02:
            return kind, header, arrays
        named = {f"{name}/{agent}": array for name, array in arrays.items() for agent in self._some()}
        return kind, self._said_of_some(header), named

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        method, path, raw, headers = super().request()
        with suppress(orjson.JSONDecodeError):
            body = orjson.loads(raw)
            if isinstance(body, dict) and "observation" in body:
                for name in {"observation", "action"} & body.keys():
                    body[name] = dict.fromkeys(self._some(), body[name])
                raw = orjson.dumps(self._said_of_some(body))
        return method, path, raw, headers

    def _some(self) -> list[str]:
        return [agent for agent, odds in (("red", 0.9), ("blue", 0.5), ("green", 0.02)) if self._rng.random() < odds]

    def _said_of_some(self, body: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        said = {name: dict.fromkeys(self._some(), body[name]) for name in ("reward", "info") if name in body}
        for end in ("terminated", "truncated"):
            if rng.random() < 0.1:
                done = rng.choice([True, False, False, self._strange()])
                said[end] = dict.fromkeys([*self._some(), *(["__all__"] * (rng.random() < 0.3))], done)
        if rng.random() < 0.03:
            said[rng.choice(["reward", "info", "terminated", "truncated"])] = self._strange()
        return body | said


@contextmanager
def beside_agents() -> Iterator[tuple[Any, Callable[[], None]]]:
    """A server of several agents, and an honest client's step by call; its episode is whole at the end."""
    steps = 0
    with served_agents(num_envs=128) as served, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()

        def go_on() -> None:
            nonlocal steps
            seen = {agent: [steps % 50, 1] for agent in ("red", "blue")}
            assert client.get_action(episode, seen) == {agent: rule(own) for agent, own in seen.items()}
            client.log_returns(episode, {"red": 1.0})
            steps += 1

        go_on()
        yield served, go_on
        client.end_episode(episode, {"red": [0, 1], "blue": [0, 1]})
    own = [chunk for chunk in served.chunks if len(chunk) and chunk.obs[0, 1] == 1]
    rewards = {agent: sum(sum(c.rewards) for c in own if c.agent_id == agent) for agent in ("red", "blue")}
    assert rewards == {"red": steps, "blue": 0.0}


def by_zmq(seed: int, hostile: Hostile, endpoint: str, keys: ClientKeys | None) -> Counter[str]:
    """Return the number of answers by error, and "" for answers without an error. Every message is answered."""
    told, mutator = Counter[str](), Mutator(seed, "serving")
    rng = mutator.random
    with zmq.Context() as context:
        for first in range(0, MESSAGES, AT_ONCE):
            with context.socket(zmq.DEALER) as sock:
                sock.linger = 0
                for name, value in keys.options().items() if keys is not None else ():
                    setattr(sock, name.lower(), value)
                sock.connect(endpoint)
                _join(sock, f"session-{seed}")
                for _ in range(first, min(first + AT_ONCE, MESSAGES)):
                    kind, header, arrays = hostile.message()
                    if rng.random() < 0.1:
                        header[rng.choice(("request", "step", "reward"))] = rng.choice(NUMBERS)
                    frames = encode(kind, header, arrays)
                    frames = (rng.random() < 0.2 and mutator.message(frames)) or frames
                    if sum(len(frame) for frame in frames) > LIMITS.max_message_bytes - 1024:
                        continue  # libzmq would end the connection
                    is_joined = seed % 4 < 2 and len(frames) > 1  # damage may have left a frame alone
                    sock.send_multipart(join_frames(frames) if is_joined else frames)
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


def bytes_by_http(seed: int, url: str) -> Counter[str]:
    """Send requests with wrong bytes or lines. Return the answers as `by_zmq` does: each is whole, and JSON."""
    told, mutator = Counter[str](), Mutator(seed, "http")
    rng, path = mutator.random, f"/v1/sessions/session-{seed}"
    for _ in range(MESSAGES):
        body = rng.choice((b"", b"{}", b'{"observation": [1, 2], "reward": 0.0}', b"2\r\n{}\r\n0\r\n\r\n"))
        sizes = f"Content-Length: {len(body)}", f"Content-Length: {rng.choice(NUMBERS)}", "Transfer-Encoding: chunked"
        lines = rng.choices((*sizes, sizes[0], "Expect: x"), k=rng.choice((1, 1, 1, 2)))
        data = head(path + rng.choice(("", "/episodes/e", "/episodes/e/steps/0")), *lines) + body
        data = rng.choice((data, data + HEALTH, mutator.data(data), mutator.data(mutator.data(data))))
        with RawHttp(url) as client:
            client.say(data)
            client.said_all()
            with suppress(ConnectionError):
                while answer := client.hear():
                    assert answer.status < 500 or HTTP_STATUS.get(answer.body["error"]) == answer.status, (data, answer)
                    told[answer.body.get("error", "")] += 1
            assert not client.read, (data, client.read)
    return told


@contextmanager
def serving() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that sends the requests of a seed to one of the servers, by ZeroMQ or by HTTP."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys"
        make_keys(folder)
        keys = read_client_keys(folder, CLIENT)
        limits = replace(LIMITS, max_sessions=1000)
        server = stack.enter_context(Served(limits, keys=port_keys(str(folder), CLIENT)))
        go_on = stack.enter_context(somebody_else(server, keys))
        of_agents, agents_go_on = stack.enter_context(beside_agents())

        def play(seed: int, said: Counter[str]) -> None:
            kind, to, key, on = Hostile, server, keys, go_on
            if seed % 2:
                kind, to, key, on = HostileAgents, of_agents, None, agents_go_on
            hostile = kind(seed, f"session-{seed}")
            match seed % 3:
                case 0:
                    told, way = codes_by_http(hostile, to.url, MESSAGES, on), "HTTP"
                case 1:
                    told, way = by_zmq(seed, hostile, to.endpoint, key), "ZeroMQ"
                case _:
                    told, way = bytes_by_http(seed, to.url), "bytes by HTTP"
            assert set(told) <= {"", *HTTP_STATUS}, told
            said.update({f"{way}: {code or 'taken'}": count for code, count in told.items()})
            on()

        yield play
