"""A real runner of several agents whose episodes are those of clients elsewhere, and two plain ways to speak to it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import orjson
import torch
import zmq

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.errors.serving import error_of
from headrace.schemas.frames.wire import decode, encode
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner
from headrace.workers.agents.env import MultiAgentEnv
from headrace.workers.serving.served_env import ServedEnvs
from headrace.workers.serving.serving_messages import AgentsStep, ClientHello, ClientReject, EpisodeAbort, EpisodeStart
from support.waiting import TIMEOUT_S


def rule(observation: Any) -> int:
    """The policy: what is done for an observation, also of an agent "deep"."""
    seen = observation["at"][0] if isinstance(observation, dict) else observation
    return int(seen[0] * 7 + seen[1]) % 1000


class Rule(torch.nn.Module):
    """`rule`, as a policy module."""

    noise_size = 1
    noise_kind: Literal["uniform", "normal"] = "uniform"

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        seen = batch["obs"]["at"][0] if isinstance(batch["obs"], dict) else batch["obs"]
        return {"actions": (seen[:, 0] * 7 + seen[:, 1]).to(torch.int64) % 1000}

    forward_inference = forward_train = forward_exploration


class Like(MultiAgentEnv):
    """Has spaces, and is never stepped. What agent "deep" sees is nested."""

    def __init__(self, agents: Sequence[Any]) -> None:
        plain = gym.spaces.Box(-100, 100, (2,), np.float32)
        deep = gym.spaces.Dict({"at": gym.spaces.Tuple((plain, gym.spaces.Discrete(3))), "arm": plain})
        self.possible_agents = list(agents)
        self.observation_spaces = {agent: deep if agent == "deep" else plain for agent in agents}
        self.action_spaces = {agent: gym.spaces.Discrete(1000) for agent in agents}


class ServedAgents:
    """`endpoint` is for ZeroMQ, `url` for HTTP; `chunks` is what the learner would have got so far."""

    def __init__(self, agents: Sequence[Any], lease_s: float, **settings: Any) -> None:
        serving = ServingSection(enabled=True, http_port=0, lease_s=lease_s, max_message_bytes=1 << 16)
        creator = ServedEnvs(serving, lambda context: Like(agents), "", several_agents=True)
        small = {"num_envs": 4, "rollout_fragment_length": 8, "external_fragment_max_age_s": 0.1}
        settings = {**small, "module": lambda spaces: Rule(), "infos": "all", **settings}
        policies = {"plain": None, "deep": None} if "deep" in agents else {"plain": None}
        mapping = {agent: "deep" if agent == "deep" else "plain" for agent in agents}
        self.runner = MultiAgentEnvRunner(
            EnvRunnerConfig(env=creator, policies=policies, policy_mapping_fn=mapping, **settings)
        )
        self.runner.set_weights({name: {} for name in policies}, 1, 1)
        self.env: Any = self.runner.env
        self.endpoint, self.url = self.env.endpoint, self.env.url
        self.chunks: list[EpisodeChunk] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopping.is_set():
            self.chunks += self.runner.sample_fragment()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(100)
        self.chunks += self.runner.discard_open(Discard.SHUTDOWN)
        self.runner.stop()
        totals = self.runner.totals
        assert totals.stepped == totals.delivered + sum(totals.discarded.values())
        assert totals.delivered == sum(map(len, self.chunks))
        assert totals.env_failures == 0


@contextmanager
def served_agents(agents: Sequence[Any] = ("red", "blue"), lease_s: float = 20.0, **settings: Any) -> Iterator[Any]:
    """Its books balance at the end, and nothing failed in it."""
    served = ServedAgents(agents, lease_s, **settings)
    try:
        yield served
    finally:
        served.close()


class ByHttp:
    """Says one thing after another as one client; gives the answer's fields, or raises what it is told."""

    def __init__(self, served: Any, session: str) -> None:
        self._session = f"{served.url}/v1/sessions/{session}"
        self.say("PUT", "")

    def say(self, method: str, path: str, body: Any = b"") -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        request = urllib.request.Request(self._session + path, data, {"Headrace-Client": "own"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return orjson.loads(answer.read())
        except urllib.error.HTTPError as refusal:
            with refusal:
                told = orjson.loads(refusal.read())
            raise error_of(told["error"], told["message"], told["facts"]) from None

    def start(self, episode: str, **body: Any) -> Any:
        return self.say("PUT", f"/episodes/{episode}", body)

    def step(self, episode: str, step: int, observation: Any, **body: Any) -> Any:
        return self.say("PUT", f"/episodes/{episode}/steps/{step}", {"observation": observation, **body})

    def abort(self, episode: str) -> Any:
        return self.say("DELETE", f"/episodes/{episode}")

    def close(self) -> None:
        """Each request had a connection of its own."""


class ByZmq:
    """Likewise. Observations and actions are arrays by agent."""

    def __init__(self, served: Any, session: str) -> None:
        self._who = {"session": session, "token": "own"}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(served.endpoint)
        self.say(ClientHello(**self._who).frames())

    def say(self, frames: Any) -> Any:
        self._socket.send_multipart(frames)
        assert self._socket.poll(100_000), "no answer"
        message = decode(self._socket.recv_multipart())
        if message.kind is ClientReject.KIND:
            header = message.header
            raise error_of(header["error"], header["message"], header["facts"])
        actions = {name.removeprefix("actions/"): array.tolist() for name, array in message.arrays.items()}
        return message.header | ({"action": actions} if actions else {})

    def start(self, episode: str, **body: Any) -> Any:
        return self.say(encode(EpisodeStart.KIND, {**self._who, "episode": episode, **body}))

    def step(self, episode: str, step: int, observation: Any, **body: Any) -> Any:
        arrays = {f"obs/{agent}": np.asarray(own, np.float32) for agent, own in observation.items()}
        if "action" in body:
            arrays |= {f"actions/{agent}": np.asarray(own) for agent, own in body.pop("action").items()}
            body["off_policy"] = True
        header = {**self._who, "episode": episode, "step": step, **body}
        return self.say(encode(AgentsStep.KIND, header, arrays))

    def abort(self, episode: str) -> Any:
        return self.say(EpisodeAbort(**self._who, episode=episode).frames())

    def close(self) -> None:
        self._context.destroy(linger=0)
