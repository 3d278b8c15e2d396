"""Chunks of external episodes: their weights and log-probs, and the steps that are kept from the learner."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.errors import ConfigError, EnvError, ModuleError
from headrace.schemas.errors.episodes import (
    EpisodeAbortedError,
    EpisodesClosedError,
)
from headrace.workers import RunnerCallback, SingleAgentEnvRunner
from headrace.workers.connectors import FlattenObservations, FrameStack, PreviousActionReward
from headrace.workers.external import Answer, ExternalEnv
from support.envs.external import Idle, Serving, idle, pieced, see, table
from support.envs.toy import check_books, runner
from support.refusals import refused
from support.runners.connectors import Echo, Halves, NextAction


def test_every_action_uses_the_newest_weights_and_its_step_records_them() -> None:
    with idle() as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()
        weights = sampler.get_state("rl_module")["rl_module"]
        episodes.start("one")
        for t in range(4):
            sampler.set_weights(weights, seq=t + 1, learner_epoch=0)
            episodes.ask("one", see(t), answers.append)
            chunks += sampler.sample_fragment()
        episodes.end("one", see(4), answers.append)
        chunks += sampler.sample_fragment()
        assert [answer.weights for answer in answers[:4]] == [(0, 1), (0, 2), (0, 3), (0, 4)]
        assert to_episode(chunks).weights_seq.tolist() == [1, 2, 3, 4]
        assert to_episode(chunks).actions.tolist() == [answer.action for answer in answers[:4]]


def test_no_step_mixes_the_weights_number_and_epoch_of_two_learners() -> None:
    """Weights of a new learner abort the open episode, so that no step mixes the two."""
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        weights = sampler.get_state("rl_module")["rl_module"]
        sampler.set_weights(weights, seq=7, learner_epoch=1)
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), answers.append)
            sampler.sample_fragment()
        sampler.set_weights(weights, seq=1, learner_epoch=2)
        episodes.ask("one", see(2), answers.append)
        (marker,) = sampler.sample_fragment()
        assert marker.end_reason == "reset"
        assert isinstance(answers[-1].error, EpisodeAbortedError)
        assert sampler.weights_version == (2, 1)
        episodes.start("two")
        episodes.ask("two", see(0), answers.append)
        sampler.sample_fragment()
        assert answers[-1].weights == (2, 1)


def test_episodes_with_training_disabled_are_counted_and_not_delivered() -> None:
    class Mixed(Serving):
        def play_on(self, thread: int) -> None:
            for number in range(1000):
                self.play(number, training_enabled=number % 2 == 0)

    with runner(Mixed, num_envs=1, rollout_fragment_length=40) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert all(chunk.obs[0, 1] % 2 == 0 for chunk in chunks)
        assert sampler.totals.discarded == {"training_disabled": 100}
        assert sum(map(len, chunks)) == 100
        report = sampler.get_metrics()
        assert (report["num_episodes"], report["num_untrained_episodes_lifetime"]) == (4, 4)
        assert (report["untrained_episode_return_mean"], report["untrained_episode_len_mean"]) == (325.0, 25)
        assert len(sampler.sample(num_episodes=2)) >= 2


def test_the_log_prob_of_a_logged_action_is_the_policys_own() -> None:
    with runner(Serving, num_envs=1, env_config={"logged": 7}) as sampler:
        (chunk,) = sampler.sample(num_episodes=1)
        inputs = chunk.columns["action_dist_inputs"]
        shifted = inputs - inputs.max(axis=1, keepdims=True)
        logp = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        assert np.allclose(chunk.columns["logp"], logp[np.arange(25), chunk.actions], atol=1e-6)


class Steering(Idle):
    """Actions from -2 to 6, which the default policy squashes."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.action_space = gym.spaces.Box(-2.0, 6.0, (2,), np.float32)


class Silent(torch.nn.Module):
    """A policy that can give no log-prob but its own."""

    noise_size, noise_kind = 1, "uniform"

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["obs"])
        return {"actions": torch.zeros(rows, dtype=torch.int64), "logp": torch.zeros(rows)}

    forward_inference = forward_train = forward_exploration


def log_one(sampler: SingleAgentEnvRunner, action: Any) -> EpisodeChunk:
    episodes, answers = table(sampler), list[Answer]()
    episodes.start("one")
    episodes.log_action("one", see(0), action, answers.append)
    sampler.sample_fragment()
    assert np.array_equal(answers[0].action, action)
    episodes.end("one", see(1), answers.append)
    (chunk,) = sampler.sample_fragment()
    return chunk


def test_a_logged_action_is_stored_in_units_of_the_policy_and_of_the_env() -> None:
    with runner(Steering, external_fragment_max_age_s=0.05) as sampler:
        chunk = log_one(sampler, np.array([4.0, -2.0], np.float32))
        assert chunk.columns["actions_for_env"].tolist() == [[4.0, -2.0]]
        assert chunk.actions.tolist() == [[0.5, -1.0]]
        module: Any = sampler.module
        inputs = torch.from_numpy(chunk.columns["action_dist_inputs"])
        assert np.allclose(chunk.columns["logp"], module.logp(inputs, torch.tensor([[0.5, -1.0]])))


def test_a_module_without_logp_gives_a_logged_action_a_nan_log_prob() -> None:
    with idle(module=lambda spaces: Silent()) as sampler:
        chunk = log_one(sampler, 3)
        assert chunk.actions.tolist() == [3]
        assert np.isnan(chunk.columns["logp"]).all()


class Fickle(Silent):
    """Each pass it does something else, and its third log-prob is of another dtype."""

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        answer = super().forward_exploration(batch)
        passes = self.__dict__["passes"] = self.__dict__.get("passes", 0) + 1
        logp = answer["logp"].to(torch.float64 if passes == 3 else torch.float32)
        return {"actions": answer["actions"] + passes, "logp": logp}


def test_an_action_that_could_not_be_recorded_aborts_its_episode() -> None:
    with idle(module=lambda spaces: Fickle()) as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), answers.append)
            chunks += sampler.sample_fragment()
        episodes.ask("one", see(2), answers.append)
        with pytest.raises(ModuleError, match="keep it the same"):
            sampler.sample_fragment()
        with pytest.raises(EpisodeAbortedError):
            episodes.ask("one", see(3), answers.append)
        chunks += sampler.sample_fragment()
        assert [chunk.end_reason for chunk in chunks] == [None, "reset"]
        assert chunks[0].actions.tolist() == [1]
        episodes.start("two")
        episodes.ask("two", see(0), answers.append)
        chunks = list(sampler.sample_fragment())
        episodes.end("two", see(1), answers.append)
        chunks += sampler.sample_fragment()
        assert to_episode(chunks).actions.tolist() == [answers[-2].action]
        assert sampler.totals.discarded == {"reset": 1}
        check_books(sampler)


def test_connectors_memory_and_callbacks_work_with_logged_actions() -> None:
    told: list[str] = []

    class Account(RunnerCallback):
        def on_episode_created(self, episode: Any, **_: Any) -> None:
            told.append("created")

        def on_episode_start(self, episode: Any, **_: Any) -> None:
            told.append("start")

        def on_episode_end(self, episode: Any, **_: Any) -> None:
            assert len(episode) == 5
            told.append("end")

    settings = {
        "env_to_module": [PreviousActionReward, FlattenObservations, lambda: FrameStack(2)],
        "module": "headrace.workers.modules:lstm_actor_critic",
        "callbacks": [Account],
        "env_config": {"logged": 42, "length": 5},
    }
    with runner(Serving, num_envs=1, rollout_fragment_length=7, **settings) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
    assert told[:6] == ["created", "start", "end", "created", "start", "end"]
    for chunk in chunks:
        assert chunk.state_in
    pieced(chunks)


def test_external_observations_and_actions_pass_the_connectors() -> None:
    with idle(env_to_module=[Halves], module_to_env=[NextAction], module=Echo) as sampler:
        episodes, answers, chunks = table(sampler), list[Answer](), list[EpisodeChunk]()
        for name, number in (("one", 7), ("two", 8)):
            episodes.start(name)
            for t in range(3):
                episodes.ask(name, see(t, number), answers.append)
                chunks += sampler.sample_fragment()
            episodes.end(name, see(3, number), answers.append)
            chunks += sampler.sample_fragment()
        assert sampler.spaces.observation.dtype == "<f8"
        assert sampler.totals.env_failures == 0
    episodes_seen = [to_episode(parts) for parts in pieced(chunks).values()]
    assert [episode.obs.tolist() for episode in episodes_seen] == [
        [[t / 2, number / 2] for t in range(4)] for number in (7, 8)
    ]
    for episode, answered in zip(episodes_seen, (answers[:3], answers[4:7]), strict=True):
        assert np.array_equal(episode.columns["saw"], episode.obs[:-1])
        assert np.array_equal(episode.columns["actions_for_env"], (episode.actions + 1) % 100)
        assert episode.columns["actions_for_env"].tolist() == [answer.action for answer in answered]


def test_a_raising_callback_aborts_the_episode_and_its_client_gets_an_error() -> None:
    def spoil(episode: Any) -> None:
        if len(episode) == 2:
            raise ValueError("not this one")

    with idle(callbacks=[{"on_episode_step": spoil}]) as sampler:
        episodes = table(sampler)
        episodes.start("one")
        for t in range(3):
            episodes.ask("one", see(t), lambda _: None)
            sampler.sample_fragment()
        with pytest.raises(EpisodeAbortedError):
            episodes.log_returns("one", 1.0)
        assert sampler.totals.discarded == {"callback_exception": 1}
        check_books(sampler)


def test_log_action_is_refused_where_connectors_map_actions() -> None:
    with idle(module_to_env=["headrace.workers.connectors:ClipActions"]) as sampler:
        table(sampler).start("one")
        with refused("cannot_log", match="module_to_env"):
            table(sampler).log_action("one", see(0), 1, lambda _: None)


def test_learner_and_client_both_see_the_end_of_a_discarded_episode() -> None:
    with idle() as sampler:
        episodes = table(sampler)
        episodes.start("one")
        for t in range(2):
            episodes.ask("one", see(t), lambda _: None)
            sampler.sample_fragment()
        (marker,) = sampler.discard_open(Discard.SHUTDOWN)
        assert (marker.end, marker.end_reason) == (ChunkEnd.ABORTED, "shutdown")
        with pytest.raises(EpisodeAbortedError, match="given it up"):
            episodes.ask("one", see(2), lambda _: None)
        episodes.start("two")
        episodes.ask("two", see(0), lambda _: None)
        sampler.make_env()
        with pytest.raises(EpisodesClosedError):
            episodes.start("three")
        table(sampler).start("three")
        check_books(sampler)


def test_a_constructor_that_does_not_call_super_is_refused() -> None:
    class Careless(ExternalEnv):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"super\(\).__init__\(action_space, observation_space\)"):
        runner(Careless)
    with pytest.raises(EnvError, match="in no runner yet"):
        Serving({}).start_episode()
