"""External multi-agent envs: chunks of each agent are correct as agents come, pause, leave or have logged actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.errors import ConfigError, EnvContractError, EnvError
from headrace.schemas.errors.episodes import EpisodeAbortedError
from headrace.workers import PolicySpec
from headrace.workers.external import Answer, ExternalMultiAgentEnv
from headrace.workers.policy.policies import PolicyMappingError
from support.envs.external_agents import Crowd, Idle, idle, pieced, see, table
from support.envs.toy import runner
from support.envs.toy_agents import check_books, multi_runner
from support.runners.connectors import Echo, Halves, NextAction


def agent_steps(length: int) -> int:
    """Of one episode of a `Crowd`."""
    return length + (length + 1) // 2 + 3


def test_fragments_have_the_configured_env_steps_and_episodes_are_whole() -> None:
    """An env of 25 steps, fragments of 40: 40, 40, 40 env steps; whole episodes: 50, 50, 50."""
    with multi_runner(Crowd, num_envs=1, rollout_fragment_length=40) as sampler:
        chunks = []
        for cut in range(3):
            chunks += list(sampler.sample())
            assert sampler.totals.env_steps_delivered == 40 * (cut + 1)
        check_books(sampler)
    for (_, agent), parts in pieced(chunks).items():
        whole = to_episode(parts)
        if parts[-1].end is not ChunkEnd.ONGOING:
            expected = {"a": range(25), "b": range(0, 25, 2), "c": range(2, 5)}[agent]
            assert whole.env_t.tolist() == list(expected)
            assert whole.rewards.tolist() == [t + 1.0 for t in expected]
            last = 5 if agent == "c" else 25
            assert whole.obs[:, 0].tolist() == [*expected, last]
        assert len(set(whole.obs[:, 1])) == 1
    with multi_runner(Crowd, num_envs=2, rollout_fragment_length=40, batch_mode="complete_episodes") as sampler:
        for cut in range(3):
            sampled = sampler.sample()
            assert sum(map(len, sampled)) == 2 * agent_steps(25)
            assert all(chunk.is_terminated for chunk in sampled)
            assert sampler.totals.env_steps_delivered == 50 * (cut + 1)
        check_books(sampler)


def test_each_agents_logged_actions_are_stored_at_their_steps() -> None:
    """Action 42 is logged first and last in each episode, and marked off-policy."""
    with multi_runner(Crowd, num_envs=1, env_config={"logged": 42}) as sampler:
        for chunk in sampler.sample(num_episodes=2):
            off_policy = chunk.columns["off_policy"]
            assert off_policy.dtype == np.bool_
            marked = {"a": [0, 24], "b": [0, 12], "c": []}[chunk.agent_id]
            assert np.flatnonzero(off_policy).tolist() == marked
            assert (chunk.actions[marked] == 42).all()
            assert np.isfinite(chunk.columns["logp"]).all()


def test_any_two_of_five_open_episodes_may_step_in_one_round() -> None:
    class Multi(Crowd):
        def run(self) -> None:
            random = np.random.default_rng(5)
            steps = {self.start_episode(): 0 for _ in range(5)}
            while True:
                for episode in random.choice(list(steps), 2, replace=False).tolist():
                    t = steps[episode]
                    if t == self.length:
                        self.end_episode(episode, {"a": see(t), "b": see(t)})
                        del steps[episode]
                        steps[self.start_episode()] = 0
                        continue
                    self.get_action(episode, {"a": see(t), "b": see(t)})
                    self.log_returns(episode, {"a": t + 1.0, "b": -1.0})
                    steps[episode] = t + 1

    settings = {"policies": {"a": None, "b": None}, "rollout_fragment_length": 20}
    with multi_runner(Multi, num_envs=5, **settings) as sampler:
        chunks = [chunk for _ in range(4) for chunk in sampler.sample()]
        check_books(sampler)
        assert sampler.totals.delivered == sum(map(len, chunks)) == 800
    found = pieced(chunks)
    assert sum(parts[-1].is_terminated for parts in found.values()) >= 20
    for (_, agent), parts in found.items():
        whole = to_episode(parts)
        assert {chunk.module_id for chunk in parts} == {agent}
        assert whole.rewards.tolist() == (whole.obs[1:, 0].tolist() if agent == "a" else [-1.0] * len(whole))


def test_an_unobserved_agent_keeps_its_rewards_and_an_info_is_stored_once() -> None:
    with idle() as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()

        def ask(*agents: str, t: int) -> None:
            episodes.ask("one", {agent: see(t) for agent in agents}, answers.append)
            chunks.extend(sampler.sample_fragment())

        episodes.start("one")
        ask("a", "b", t=0)
        episodes.log_returns("one", {"a": 1.0, "b": 10.0, "c": 100.0}, {"a": {"first": 1}})
        episodes.log_returns("one", {"a": 0.5}, {"a": {"second": 2}})
        ask("a", t=1)
        episodes.log_returns("one", {"b": 20.0})
        ask("b", "a", "c", t=2)
        assert [list(answer.action) for answer in answers] == [["a", "b"], ["a"], ["b", "a", "c"]]
        episodes.log_returns("one", {"c": 1.0}, None, None, {"b": True})
        episodes.end("one", {"b": see(3), "a": see(3)}, answers.append)
        chunks += sampler.sample_fragment()
        check_books(sampler)
    whole = {agent: parts for (_, agent), parts in pieced(chunks).items()}
    assert to_episode(whole["a"]).rewards.tolist() == [1.5, 0.0, 0.0]
    assert to_episode(whole["a"]).infos == [{}, {"second": 2}, {}, {}]
    assert to_episode(whole["b"]).rewards.tolist() == [30.0, 0.0]
    assert whole["b"][-1].end is ChunkEnd.TRUNCATED
    assert to_episode(whole["c"]).rewards.tolist() == [101.0]
    assert to_episode(whole["c"]).obs[:, 0].tolist() == [2.0, 2.0]  # it got no last one, and needs none
    assert whole["c"][-1].is_terminated


def test_every_step_records_the_weights_that_chose_its_action() -> None:
    with idle() as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()
        weights = sampler.get_state("rl_module")["rl_module"]
        episodes.start("one")
        for t in range(4):
            sampler.set_weights(weights, seq=t + 1, learner_epoch=0)
            episodes.ask("one", {"a": see(t)}, answers.append)
            chunks += sampler.sample_fragment()
        episodes.end("one", {"a": see(4)}, answers.append, truncated=True)
        chunks += sampler.sample_fragment()
        assert [answer.weights for answer in answers[:4]] == [(0, 1), (0, 2), (0, 3), (0, 4)]
        assert to_episode(chunks).weights_seq.tolist() == [1, 2, 3, 4]
        assert to_episode(chunks).actions.tolist() == [answer.action["a"] for answer in answers[:4]]
        assert chunks[-1].end is ChunkEnd.TRUNCATED


def test_external_observations_and_actions_of_agents_pass_the_connectors() -> None:
    with idle(env_to_module=[Halves], module_to_env=[NextAction], module=Echo) as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()
        episodes.start("one")
        for t in range(3):
            seen = {"a": see(t, 7)} if t == 1 else {"a": see(t, 7), "b": see(t, 9)}
            episodes.ask("one", seen, answers.append)
            chunks += sampler.sample_fragment()
        episodes.end("one", {"a": see(3, 7), "b": see(3, 9)}, answers.append)
        chunks += sampler.sample_fragment()
        assert sampler.totals.env_failures == 0
    lives = {agent: to_episode(parts) for (_, agent), parts in pieced(chunks).items()}
    assert lives["a"].obs.tolist() == [[t / 2, 3.5] for t in range(4)]
    assert lives["b"].obs.tolist() == [[t / 2, 4.5] for t in (0, 2, 3)]
    for agent, life in lives.items():
        assert np.array_equal(life.columns["saw"], life.obs[:-1])
        assert np.array_equal(life.columns["actions_for_env"], (life.actions + 1) % 100)
        told = [answer.action[agent] for answer in answers[:3] if agent in answer.action]
        assert life.columns["actions_for_env"].tolist() == told


def test_episodes_with_training_disabled_are_counted_and_not_delivered() -> None:
    class Every(Crowd):
        def run(self) -> None:
            for number in range(10**6):
                self.play(number, training_enabled=number % 2 == 0)

    with multi_runner(Every, num_envs=1, env_config={"length": 6}, rollout_fragment_length=9) as sampler:
        chunks = [chunk for _ in range(8) for chunk in sampler.sample()]
        check_books(sampler)
        assert sampler.totals.discarded == {"training_disabled": 6 * agent_steps(6)}
        assert sampler.totals.env_steps_delivered == 36
        assert sampler.totals.env_steps_discarded == 36
        report = sampler.get_metrics()
    assert all(chunk.obs[0, 1] % 2 == 0 for chunk in chunks)
    assert sum(map(len, chunks)) == 6 * agent_steps(6)
    assert report["num_untrained_episodes_lifetime"] == 6
    assert report["untrained_episode_len_mean"] == 6
    assert report["num_episodes"] == 6


def test_a_lost_client_costs_only_its_own_episode() -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        for t in range(3):
            for name in ("one", "two"):
                if t == 0:
                    episodes.start(name)
                episodes.ask(name, {"a": see(t), "b": see(t)}, answers.append)
            sampler.sample_fragment()
        episodes.ask("one", {"b": see(3)}, answers.append)
        episodes.abort("one", "its heartbeat has stopped")
        chunks = sampler.sample_fragment()
        assert [(chunk.end_reason, len(chunk)) for chunk in chunks] == [("client_lost", 0)] * 2
        assert isinstance(answers[-1].error, EpisodeAbortedError)
        assert episodes.counts() == {"open": 1, "waiting": 0, "free": 1, "remembered": 1}
        episodes.end("two", {"a": see(3), "b": see(3)}, answers.append)
        assert all(chunk.is_terminated for chunk in sampler.sample_fragment())
        assert sampler.totals.env_failures == 0
        check_books(sampler)


@pytest.mark.parametrize("how", ["returning", "raising"])
def test_a_run_that_ends_within_an_episode_drops_it_and_is_restarted(how: str) -> None:
    class Failing(Crowd):
        def run(self) -> None:
            episode = self.start_episode()
            for t in range(30):
                self.get_action(episode, {agent: see(t) for agent in self.at(t)})
                self.log_returns(episode, {"a": 1.0}, None, {"c": t == 4})
            if how == "raising":
                raise RuntimeError("the simulator is gone")

    with multi_runner(Failing, num_envs=2, rollout_fragment_length=10) as sampler:
        chunks = [chunk for _ in range(6) for chunk in sampler.sample(end_markers=True)]
        check_books(sampler)
        assert sampler.totals.env_failures >= 2
        assert set(sampler.totals.discarded) == {Discard.ENV_EXCEPTION.value}
        sampler.discard_open(Discard.SHUTDOWN)
        check_books(sampler)
    ends = {agent: parts[-1].end for (_, agent), parts in pieced(chunks).items()}
    assert ends["a"] in (ChunkEnd.ABORTED, ChunkEnd.ONGOING)
    assert sum(chunk.end is ChunkEnd.ABORTED for chunk in chunks) >= 2


def test_make_env_gives_the_new_env_its_own_table_of_episodes() -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("one")
        episodes.ask("one", {"a": see(0)}, answers.append)
        sampler.sample_fragment()
        sampler.make_env()
        assert table(sampler) is not episodes
        table(sampler).start("one")
        table(sampler).ask("one", {"b": see(0)}, answers.append)
        sampler.sample_fragment()
        assert list(answers[-1].action) == ["b"]
        check_books(sampler)


def test_memory_connectors_and_policies_keep_agents_apart() -> None:
    lstm = PolicySpec(
        "headrace.workers.modules:lstm_actor_critic", env_to_module=["headrace.workers.connectors:FrameStack"]
    )
    policies = {"remembers": lstm, "plain": None}
    settings = {"policies": policies, "policy_mapping_fn": {"a": "remembers", "b": "plain", "c": "remembers"}}
    with multi_runner(Crowd, num_envs=2, rollout_fragment_length=20, **settings) as sampler:
        chunks = [chunk for _ in range(3) for chunk in sampler.sample()]
        check_books(sampler)
    for (_, agent), parts in pieced(chunks).items():
        assert {chunk.module_id for chunk in parts} == {"plain" if agent == "b" else "remembers"}


def test_a_mapping_error_is_raised_and_aborts_the_open_episode() -> None:
    def mapping(agent: Any, episode_id: str) -> str:
        return "shared" if agent != "c" else "nobody"

    with idle(policy_mapping_fn=mapping) as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("one")
        episodes.ask("one", {"a": see(0)}, answers.append)
        sampler.sample_fragment()
        episodes.ask("one", {"a": see(1), "c": see(1)}, answers.append)
        with pytest.raises(PolicyMappingError, match="'c' was mapped to 'nobody'"):
            sampler.sample_fragment()
        assert isinstance(answers[-1].error, EpisodeAbortedError)
        check_books(sampler)


def test_each_kind_of_runner_refuses_the_other_kind_of_external_env() -> None:
    with pytest.raises(EnvContractError, match="for an env of several agents give `policies`"):
        runner(Idle)

    class Unbuilt(Idle):
        def __init__(self) -> None:
            self.config = {}

    with pytest.raises(ConfigError, match=r"Unbuilt must call super\(\)"):
        multi_runner(Unbuilt)


@pytest.mark.parametrize(
    ("actions", "observations", "sentence"),
    [
        (gym.spaces.Discrete(2), {"a": gym.spaces.Discrete(2)}, "action_space should be a dict by agent id"),
        ({"a": gym.spaces.Discrete(2)}, {}, "observation_space should be a dict by agent id, of at least one"),
        ({"a": gym.spaces.Discrete(2)}, {"b": gym.spaces.Discrete(2)}, r"agents of action_space should be \['b'\]"),
    ],
)
def test_action_and_observation_spaces_must_name_the_same_agents(
    actions: Any, observations: Any, sentence: str
) -> None:
    with pytest.raises(EnvContractError, match=sentence):
        ExternalMultiAgentEnv(actions, observations)
    with pytest.raises(EnvError, match="is in no runner yet"):
        Idle({}).start_episode()
