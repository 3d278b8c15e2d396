"""A wrong request about one of several agents is refused by name over ZeroMQ and HTTP, and harms no other client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import to_episode
from headrace.schemas.chunks.spaces import Box, Dict, Tuple
from headrace.schemas.errors import ConfigError, DecodeError, EnvContractError
from headrace.schemas.errors.serving import ServingError
from headrace.schemas.frames.wire import encode
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.serving.acting import ActingClient
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.client.logged_returns import LoggedReturns, LoggedReturnsByAgent
from headrace.workers.serving.episode_codec import MultiAgentCodec
from headrace.workers.serving.served_env import ServedEnvs
from headrace.workers.serving.serving_messages import AgentsStep, served_spaces_from_json
from support.refusals import refused
from support.serving.served import Served
from support.serving.served_agents import ByHttp, ByZmq, rule, served_agents
from support.waiting import TIMEOUT_S, wait_until

AGENTS = ("red", "blue", "grey")
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    with served_agents(AGENTS, num_envs=8) as served:
        yield served


class Game:
    """One episode of a plain client: "grey" has left it, and step 2 is due."""

    def __init__(self, kind: Any, served: Any) -> None:
        self.number = next(NUMBERS)
        self.name = f"{kind.__name__}-{self.number}"
        self.client = kind(served, self.name)
        self.client.start(self.name)
        self.client.step(self.name, 0, {agent: self.at(0) for agent in AGENTS})
        news = {"reward": {"red": 1.0, "grey": 2.0}, "terminated": {"grey": True}}
        self.client.step(self.name, 1, {agent: self.at(1) for agent in ("red", "blue")}, **news)

    def at(self, t: float) -> list[float]:
        return [t, float(self.number)]

    def say(self, seen: Any, **body: Any) -> Any:
        """Step 2."""
        return self.client.step(self.name, 2, seen, **body)

    def go_on(self) -> None:
        """All is as if nothing wrong had been said."""
        answer = self.say({"red": self.at(2)}, reward={"blue": 4.0})
        assert answer["action"] == {"red": rule(self.at(2))}
        last = {agent: self.at(3) for agent in ("red", "blue")}
        self.client.step(self.name, 3, last, reward={"blue": 8.0}, end="truncated")


@pytest.fixture(params=[ByZmq, ByHttp])
def game(request: pytest.FixtureRequest, shared: Any) -> Iterator[Game]:
    game = Game(request.param, shared)
    yield game
    game.go_on()
    game.client.close()
    wait_until(lambda: sum(map(len, chunks_of(shared, game))) == 6, what="six steps")
    whole = {
        agent: to_episode([c for c in chunks_of(shared, game) if c.agent_id == agent]).rewards.tolist()
        for agent in AGENTS
    }
    assert whole == {"red": [1.0, 0.0, 0.0], "blue": [0.0, 12.0], "grey": [2.0]}


def chunks_of(served: Any, game: Game) -> list[Any]:
    return [chunk for chunk in served.chunks if len(chunk) and chunk.obs[0, 1] == game.number]


@pytest.mark.parametrize(
    ("seen", "body", "sentence"),
    [
        ({"green": [2, 1]}, {}, "green"),
        ({"red": [2, 1], "grey": [2, 1]}, {}, "one of agent 'grey', which is done"),
        ({"red": [2, 1], "blue": [2]}, {}, r"obs of agent 'blue' should be <?f.* \(2,\), got shape \(1,\)"),
        ({}, {}, "none of whom is to act"),
        ({"red": [2, 1]}, {"terminated": {"red": True}}, "none of whom is to act"),
        ({"red": [2, 1]}, {"action": {"blue": 1}}, r"one of each agent that is to act, \['red'\]"),
        ({"red": [2, 1]}, {"action": {"red": 1, "grey": 1}}, "one of each agent that is to act"),
        ({"red": [2, 1], "blue": [2, 1]}, {"action": {"red": 1}}, "one of each agent that is to act"),
        ({"red": [2, 1]}, {"action": {"green": 1}}, "green"),
        ({"red": [2, 1]}, {"action": {"red": 1000}}, "actions of agent 'red' should be within"),
        ({"red": [2, 1]}, {"reward": {"red": 5.0, "green": 1.0}}, "'green' in rewards"),
        (
            {"red": [2, 1]},
            {"reward": {"red": 5.0, "grey": 1.0}},
            "live agents only, got 1.0 of agent 'grey', which is done",
        ),
        ({"red": [2, 1]}, {"reward": {"red": 5.0, "blue": 1e308}}, "eward of agent 'blue'"),
        ({"red": [2, 1]}, {"info": {"green": {}}}, "'green' in info"),
        ({"red": [2, 1]}, {"truncated": {"blue": True}}, r"none of \['blue'\], who are truncated"),
        ({"red": [2, 1]}, {"terminated": {"green": True}}, "'green' in terminated"),
        ({"red": [2, 1]}, {"end": "truncated", "reward": {"red": 5.0}}, r"none of \['blue'\], who are truncated"),
    ],
)
def test_a_step_that_breaks_the_env_contract_of_an_agent_is_refused(
    game: Game, seen: Any, body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EnvContractError, match=sentence):
        game.say(seen, **body)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"reward": 1.0}, "AgentsStep: reward"),
        ({"reward": {"red": None}}, "AgentsStep: reward.red"),
        ({"reward": {"red": "3"}}, "AgentsStep: reward.red"),
        ({"info": {"red": [1]}}, "AgentsStep: info.red"),
        ({"terminated": {"red": 1}}, "AgentsStep: terminated.red"),
        ({"terminated": ["red"]}, "AgentsStep: terminated"),
        ({"terminated": {"__all__": True}, "end": "truncated"}, "end is 'truncated', and terminated says '__all__'"),
        ({"end": ["no"], "truncated": {"__all__": True}}, "truncated says '__all__'"),
    ],
)
def test_a_step_of_wrong_fields_is_refused_by_the_fields_name(game: Game, body: dict[str, Any], sentence: str) -> None:
    with refused("bad_request", match=sentence):
        game.say({"red": game.at(2), "blue": game.at(2)}, **body)


def test_steps_out_of_order_and_in_episodes_of_other_clients_are_refused(game: Game, shared: Any) -> None:
    with refused("step_order"):
        game.client.step(game.name, 7, {"red": game.at(2)})
    other = type(game.client)(shared, f"{game.name}-other")
    with refused("unknown_episode"):
        other.step(game.name, 2, {"red": game.at(2)})
    other.start(f"{game.name}-other")
    with refused("no_action"):
        other.step(f"{game.name}-other", 0, {"red": game.at(0)}, reward={"red": 1.0})
    other.abort(f"{game.name}-other")
    other.close()


def test_nan_in_a_reward_or_an_observation_is_refused(shared: Any) -> None:
    over_http, over_zmq = Game(ByHttp, shared), Game(ByZmq, shared)
    body = b'{"observation": {"red": [2, 1]}, "reward": {"red": NaN}}'
    with refused("bad_request", match=r"AgentsStep: reward.red"):
        over_http.client.say("PUT", f"/episodes/{over_http.name}/steps/2", body)
    with refused("bad_request", match=r"AgentsStep: reward.red"):
        over_zmq.say({"red": [2, 1]}, reward={"red": float("nan")})
    with pytest.raises(EnvContractError, match="obs of agent 'red' should be free of NaN"):
        over_zmq.say({"red": [2, np.nan]})
    who = {"session": over_zmq.name, "token": "own", "episode": over_zmq.name, "step": 2}
    for header in ({"reward": 0.0}, {"end": "terminated"}):  # as clients of one agent would
        with pytest.raises((ServingError, EnvContractError), match=r"AgentsStep: reward|obs should be obs/AGENT\.\.\."):
            over_zmq.client.say(encode(AgentsStep.KIND, {**who, **header}, {"obs": np.ones(2, np.float32)}))
    for game in (over_http, over_zmq):
        game.go_on()
        game.client.close()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ((1.0,), "rewards should be a dict by agent"),
        (({"green": 1.0},), "'green' in rewards"),
        (({7: 1.0, "7": 2.0},), "a dict without two agents of the same text"),
        (({"red": float("nan")},), "reward of agent 'red' should be a finite number"),
        (({"red": "much"},), "reward of agent 'red' should be a finite number"),
        (({"grey": 1.0},), "live agents only, got 1.0 of agent 'grey', which is done"),
        (({"red": 1.0}, {"blue": 3}), "info of agent 'blue' should be a dict"),
        (({"red": 1.0}, None, {"red": "yes"}), "terminated of agent 'red' should be a bool"),
        (({"red": 1.0}, None, None, ["red"]), "truncated should be a dict by agent"),
        (({"red": 1.0}, None, {"__all__": True}), "end_episode.. ends the episode"),
    ],
)
def test_the_client_refuses_bad_returns_when_they_are_logged(said: Any, sentence: str) -> None:
    earned = LoggedReturnsByAgent(AGENTS)
    earned.add({}, None, {"grey": True})
    earned.settle()
    earned.add({"red": 2.0})
    with pytest.raises(EnvContractError, match=sentence):
        earned.add(*said)
    earned.add({"red": 1.0, "grey": 0.0}, {"blue": {"k": 1}}, {"grey": True, "blue": np.bool_(False)})
    assert earned.fields() == {"reward": {"red": 3.0}, "info": {"blue": {"k": 1}}, "terminated": {}, "truncated": {}}
    with pytest.raises(EnvContractError, match="the episode has one agent"):
        LoggedReturns().add(1.0, None, {"red": True})


def test_mixing_single_agent_and_multi_agent_client_and_server_is_an_error(shared: Any) -> None:
    with Served() as solo, PolicyClient(solo.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        with pytest.raises(EnvContractError):
            client.get_action(episode, {"red": [1, 2]})
        client.abort_episode(episode)
    with PolicyClient(shared.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        with pytest.raises(EnvContractError, match="obs should be an object by agent"):
            client.get_action(episode, [1, 2])
        client.abort_episode(episode)
    with pytest.raises(ConfigError, match="the server's episodes are of several agents"):
        ActingClient(shared.endpoint, EnvRunnerConfig())


def test_the_codec_refuses_agent_ids_that_give_two_arrays_the_same_name() -> None:
    box = Box(shape=(2,), dtype="<f4")
    with pytest.raises(EnvContractError, match="no slash confuses with another's arrays"):
        MultiAgentCodec({"a": Dict(spaces={"b": box}), "a/b": box}, "obs")
    with pytest.raises(EnvContractError, match="obs space should be of something that a client can send"):
        MultiAgentCodec({"a": Tuple(spaces=())}, "obs")
    slashed = MultiAgentCodec({"team/a": box, "team": box}, "obs")
    assert list(slashed.to_arrays({"team": np.zeros(2), "team/a": np.ones(2)})) == ["obs/team", "obs/team/a"]


def test_spaces_without_agents_or_of_a_wrong_form_are_refused() -> None:
    for told in ({"agents": {}}, {"agents": []}, {"agents": {"red": {"observation": 1}}}, {}, None):
        with pytest.raises(DecodeError):
            served_spaces_from_json(told)


def test_an_env_and_a_config_of_different_kinds_are_refused_by_name() -> None:
    two_carts, settings = "headrace.workers.agents.examples:two_carts", ServingSection(enabled=True)
    with pytest.raises(
        EnvContractError, match=r"one of one agent; for several give sampling\.policies, got .*TwoCarts"
    ):
        SingleAgentEnvRunner(EnvRunnerConfig(env=ServedEnvs(settings, two_carts, "")))
    solo = ServedEnvs(settings, "CartPole-v1", "", several_agents=True)
    with pytest.raises(EnvContractError, match="a single-agent env needs SingleAgentEnvRunner"):
        MultiAgentEnvRunner(EnvRunnerConfig(env=solo, policies={"p": None}))
