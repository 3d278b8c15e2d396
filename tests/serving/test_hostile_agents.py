"""Thousands of random requests about several agents: the server answers each, and a refusal names its error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import zmq

from headrace.schemas.errors.serving import HTTP_STATUS
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ANSWERS
from support.serving.hostile_requests import Hostile, codes_by_http
from support.serving.served_agents import rule, served_agents
from support.waiting import TIMEOUT_S

AGENTS = ("red", "blue", "green")
MESSAGES = 1000
USUAL = ("", "bad_request", "not_in_space", "unknown_episode", "step_order")


class HostileAgents(Hostile):
    """A `Hostile` client whose steps are of several agents. The server does not know the agent "green"."""

    def message(self) -> tuple[MessageKind, dict[str, Any], dict[str, Any]]:
        kind, header, arrays = super().message()
        if kind is not MessageKind.EPISODE_STEP:
            return kind, header, arrays
        named = {f"{name}/{agent}": array for name, array in arrays.items() for agent in self._some()}
        return kind, self._said_of_some(header), named if self._rng.random() < 0.98 else arrays

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        method, path, raw, headers = super().request()
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return method, path, raw, headers
        if isinstance(body, dict) and "observation" in body:
            for name in ("observation", "action"):
                if name in body:
                    body[name] = dict.fromkeys(self._some(), body[name])
            raw = orjson.dumps(self._said_of_some(body))
        return method, path, raw, headers

    def _some(self) -> list[str]:
        return [agent for agent, odds in zip(AGENTS, (0.9, 0.5, 0.02), strict=True) if self._rng.random() < odds]

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
def beside_somebody_else() -> Iterator[tuple[Any, Callable[[], None]]]:
    """A server with another client's episode, of which a call takes a step; at the end it is whole."""
    steps = 0
    with served_agents(num_envs=128) as served, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()

        def go_on() -> None:
            nonlocal steps
            seen = {agent: [steps % 50, 1] for agent in ("red", "blue")}
            assert client.get_action(episode, seen) == {agent: rule(own) for agent, own in seen.items()}
            client.log_returns(episode, {"red": 1.0})
            steps += 1

        yield served, go_on
        client.end_episode(episode, {"red": [0, 1], "blue": [0, 1]})
    own = [chunk for chunk in served.chunks if len(chunk) and chunk.obs[0, 1] == 1]
    rewards = {agent: [c.rewards for c in own if c.agent_id == agent] for agent in ("red", "blue")}
    assert np.concatenate(rewards["red"]).tolist() == [1.0] * steps
    assert np.concatenate(rewards["blue"]).tolist() == [0.0] * steps


def test_random_messages_about_agents_get_an_answer_or_a_named_error() -> None:
    hostile, told = HostileAgents(1, "own-session"), Counter[str]()
    with beside_somebody_else() as (served, go_on), zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(served.endpoint)
        for number in range(MESSAGES):
            kind, header, arrays = hostile.message()
            sock.send_multipart(encode(kind, header, arrays))
            assert sock.poll(20_000), f"no answer to {kind.name} {header}"
            answer = decode(sock.recv_multipart())
            assert answer.kind in ANSWERS
            hostile.heard(answer.header)
            told[answer.header.get("error", "")] += 1
            if number % 100 == 0:
                go_on()
    assert set(told) <= {"", *HTTP_STATUS}
    assert min(told[code] for code in USUAL) > 0


def test_random_json_about_agents_gets_an_answer_or_a_named_error() -> None:
    with beside_somebody_else() as (served, go_on):
        told = codes_by_http(HostileAgents(1, "own-session"), served.url, MESSAGES, go_on)
    assert set(told) <= {"", *HTTP_STATUS}
    assert min(told[code] for code in USUAL) > 0
