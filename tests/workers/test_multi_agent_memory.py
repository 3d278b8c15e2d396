"""Memory of a recurrent module for several agents: each agent's own steps only, over pauses, cuts and failures."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.schemas.errors import ConnectorError, ModuleError
from headrace.workers import PolicySpec
from headrace.workers.connectors import FlattenObservations, FrameStack, MeanStd, PreviousActionReward
from headrace.workers.envs import restarts
from headrace.workers.modules import lstm_actor_critic, sequences
from support.envs.toy_agents import Schedule, TakingTurns, Together, check_books, multi_runner, scheduled
from support.runners.connectors import FailingConnector
from support.runners.recurrent import LSTM, Ages, WithoutState, over_the_wire

pytestmark = pytest.mark.long

Lives = dict[Any, list[EpisodeChunk]]


def gather(lives: Lives, chunks: Any) -> None:
    for chunk in chunks:
        lives[chunk.env_index, chunk.seed, chunk.agent_id].append(chunk)


def check_ages(chunks: list[EpisodeChunk]) -> None:
    """The age is 100 and one more for each of the agent's own steps."""
    steps = 0
    for chunk in chunks:
        if len(chunk):
            assert int(chunk.state_in["age"]) == 100 + steps
            assert chunk.state_in["pair"].tolist() == [steps / 2] * 2
            np.testing.assert_array_equal(chunk.columns["age"], 100 + steps + np.arange(len(chunk)))
        steps += len(chunk)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_envs", "length", "fails"), [(1, 1, 0.0), (3, 2, 0.0), (4, 5, 0.02)])
def test_memory_follows_each_agents_own_steps_and_chunks_store_its_start(
    num_envs: int, length: int, fails: float, seed: int
) -> None:
    lives: Lives = defaultdict(list)
    settings = {"rollout_fragment_length": length, "seed": seed, "env_restart_attempts": 10**5, "module": Ages}
    with multi_runner(scheduled([], 3, fails), num_envs=num_envs, policies=["a0", "rest"], **settings,
                      policy_mapping_fn=lambda agent, _: "a0" if agent == "a0" else "rest") as sampler:  # fmt: skip
        while sampler.totals.episodes < 80:
            gather(lives, sampler.sample_fragment())
            check_books(sampler)
    for chunks in lives.values():
        check_ages(chunks)
    assert sum(len(chunks) > 1 for chunks in lives.values()) > 10


def test_whole_episodes_begin_with_the_first_state() -> None:
    settings: dict[str, Any] = {"batch_mode": "complete_episodes", "rollout_fragment_length": 3, "module": Ages}
    with multi_runner(scheduled([]), num_envs=3, **settings) as sampler:
        for _ in range(10):
            for chunk in sampler.sample_fragment():
                check_ages([chunk])


def test_random_steps_leave_memory_as_it_is() -> None:
    with multi_runner(env_config={"lengths": [50, 50]}, module=Ages) as sampler:
        sampler.sample(num_timesteps=3)
        assert all(chunk.state_in == {} for chunk in sampler.sample(num_timesteps=2, random_actions=True))
        assert {int(chunk.state_in["age"]) for chunk in sampler.sample(num_timesteps=2)} == {103}


def test_a_recurrent_and_a_stateless_module_may_act_in_one_env() -> None:
    policies = {"a0": PolicySpec(Ages), "a1": None}
    with multi_runner(policies=policies, env_config={"lengths": [9, 9]}) as sampler:
        chunks = sampler.sample(num_timesteps=4)
        assert {chunk.agent_id: sorted(chunk.state_in) for chunk in chunks} == {"a0": ["age", "pair"], "a1": []}


def test_make_module_starts_with_fresh_memory() -> None:
    env = type("Turns", (TakingTurns,), {"got": []})
    with multi_runner(env, module=Ages) as sampler:
        sampler.sample(num_timesteps=3)
        sampler.make_module()
        check_books(sampler)
        lives: Lives = defaultdict(list)
        gather(lives, (chunk for chunk in sampler.sample(num_timesteps=7) if len(chunk)))
        for chunks in lives.values():
            check_ages(chunks)


def test_a_failed_step_is_not_remembered() -> None:
    piece = type("Fails", (FailingConnector,), {"fails_at": 3})
    with multi_runner(env_config={"lengths": [9, 9]}, module=Ages, module_to_env=[piece]) as sampler:
        with pytest.raises(ConnectorError):
            sampler.sample(num_timesteps=5)
        check_books(sampler)
        for chunk in sampler.sample(num_timesteps=5):
            check_ages([chunk])


def test_a_module_that_breaks_the_protocol_is_named_when_it_is_built() -> None:
    with pytest.raises(ModuleError, match="initial_state of WithoutState"), multi_runner(module=WithoutState):
        pass


# -- the default recurrent module --------------------------------------------------------------------------------------


class Turns(TakingTurns):
    got = []  # noqa: RUF012 - nobody looks


@pytest.mark.parametrize("env", [Turns, Together, scheduled([])])
@pytest.mark.parametrize("explore", [True, False])
def test_a_learner_recomputes_the_stored_log_probabilities_from_chunks(env: Any, explore: bool) -> None:
    random = np.random.default_rng(1)
    sizes = {"hidden": (16,), "cell_size": 8}
    settings: dict[str, Any] = {
        "module": LSTM, "module_config": {**sizes, "seed": 3}, "explore": explore, "policies": ["even", "odd"],
        "policy_mapping_fn": lambda agent, _: "odd" if int(agent[1:]) % 2 else "even",
        "env_to_module": [PreviousActionReward, FlattenObservations, MeanStd],
    }  # fmt: skip
    with multi_runner(env, num_envs=3, **settings) as s:
        learners = {module_id: lstm_actor_critic(spaces, **sizes) for module_id, spaces in s.spaces.items()}
        for module_id, weights in s.get_state()["rl_module"].items():
            learners[module_id].load_state_dict({name: torch.from_numpy(a) for name, a in weights.items()})
        begun_within = 0
        for _ in range(25):
            samples: Any = s.sample(num_timesteps=3 * int(random.integers(1, 7)))
            for module_id, batch in samples.batches.items():
                if batch.steps:
                    _recompute(learners[module_id], over_the_wire(batch))
                    begun_within += sum(chunk.chunk_index > 0 and bool(chunk.state_in["h"].any()) for chunk in batch)
        assert begun_within > 20


def _recompute(learner: Any, batch: Any) -> None:
    train = sequences(batch)
    answer, steps = learner.forward_train(train), train["step_rows"]
    logp = learner.logp(answer["action_dist_inputs"][steps], torch.from_numpy(batch.columns["actions"].copy()))
    np.testing.assert_allclose(logp.detach().numpy(), batch.columns["logp"], atol=1e-5)
    np.testing.assert_allclose(answer["values"][steps].detach().numpy(), batch.columns["values"], atol=1e-5)


@pytest.mark.parametrize("backoff_s", [0.0, 0.004])
def test_siblings_of_failing_envs_are_the_same_to_the_bit_with_memory_and_connectors(
    backoff_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", backoff_s)
    faulty = (1, 2)

    def live(fails: float) -> Lives:
        lives: Lives = defaultdict(list)
        settings: dict[str, Any] = {
            "rollout_fragment_length": 20, "module": LSTM,
            "env_restart_attempts": 1000,
            "env_to_module": [PreviousActionReward, FlattenObservations, MeanStd, FrameStack(2)],
        }  # fmt: skip
        env = lambda c: Schedule(c.vector_index, [], 3, fails if c.vector_index in faulty else 0.0)  # noqa: E731
        with multi_runner(env, num_envs=5, **settings) as sampler:
            for _ in range(15):
                gather(lives, sampler.sample_fragment())
                check_books(sampler)
            assert bool(sampler.totals.env_failures) == bool(fails)
        return {key: chunks for key, chunks in lives.items() if key[0] not in faulty}

    expected, lives = live(0.0), live(0.15)
    assert expected.keys() == lives.keys()
    for key, chunks in expected.items():
        one, other = to_episode(chunks), to_episode(lives[key])
        assert one.obs.tobytes() == other.obs.tobytes()
        assert one.actions.tobytes() == other.actions.tobytes()
        for name in ("logp", "values", "action_dist_inputs"):
            assert one.columns[name].tobytes() == other.columns[name].tobytes()
        for a, b in zip(chunks, lives[key], strict=True):
            assert all(a.state_in[name].tobytes() == b.state_in[name].tobytes() for name in ("h", "c"))
