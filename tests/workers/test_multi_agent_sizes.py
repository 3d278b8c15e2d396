"""Sizes of the samples of the multi-agent runner: the steps they have, and the episodes they continue or reset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, encode_batch
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.workers.policy.module_weights import read_weights
from support.decode_batch import decode_batch
from support.envs.toy_agents import Together, check_books, multi_runner

WIDTHS = pytest.mark.parametrize("num_envs", [1, 3, 8])


def _env_steps(chunks: Any) -> int:
    """Of `Together` with agents of the same length: each env step is in one chunk of agent a0."""
    return sum(len(c) for c in chunks if c.agent_id == "a0")


@WIDTHS
def test_num_timesteps_may_count_agent_steps(num_envs: int) -> None:
    settings = {"count_steps_by": "agent_steps", "env_config": {"lengths": [30, 30, 4]}}
    with multi_runner(num_envs=num_envs, **settings) as sampler:
        for n in (1, 7, 24, 100):
            assert n <= sum(map(len, sampler.sample(num_timesteps=n))) <= n + 3 * num_envs - 1
        assert sampler.sample(num_timesteps=0) == []


@WIDTHS
def test_num_episodes_gives_whole_episodes_only(num_envs: int) -> None:
    with multi_runner(num_envs=num_envs, env_config={"lengths": [3, 7]}) as sampler:
        for m in (1, 3, 9):
            chunks = sampler.sample(num_episodes=m)
            by_episode = {c.episode_id: [] for c in chunks}  # type: ignore[var-annotated]
            for c in chunks:
                assert c.is_done
                assert c.t_start == c.chunk_index == 0
                by_episode[c.episode_id].append((c.agent_id, len(c)))
            assert m <= len(by_episode) <= m + num_envs - 1
            assert all(sorted(agents) == [("a0", 3), ("a1", 7)] for agents in by_episode.values())
            check_books(sampler)


def test_num_episodes_leaves_out_finished_agents_of_unfinished_episodes() -> None:
    def creator(context: Any) -> Together:
        return Together(
            type(context)({"lengths": [2, 4 + 9 * context.vector_index]}, vector_index=context.vector_index)
        )

    with multi_runner(creator, num_envs=2) as sampler:
        chunks = sampler.sample(num_episodes=1)
        assert sorted((c.env_index, c.agent_id, len(c)) for c in chunks) == [(0, "a0", 2), (0, "a1", 4)]
        assert sampler.totals.discarded == {"reset": 2 + 4}
        check_books(sampler)


def test_num_episodes_starts_no_extra_episode_and_num_timesteps_a_new_one() -> None:
    seeds: list[int | None] = []

    def creator(context: Any) -> Together:
        env = Together(context)
        env.seeds = seeds
        return env

    with multi_runner(creator, env_config={"lengths": [3, 3]}) as sampler:
        sampler.sample(num_episodes=4)
        assert len(seeds) == 4
        assert len(set(seeds)) == 4
        assert all(c.t_start == 0 for c in sampler.sample(num_timesteps=2))
        assert len(seeds) == 5


def test_finished_agents_come_first_in_the_chunks_of_all_modules() -> None:
    settings = {"policies": {"a0": None, "a1": None, "a2": None}, "env_config": {"lengths": [20, 3, 5]}}
    with multi_runner(num_envs=3, **settings) as sampler:
        chunks = sampler.sample(num_timesteps=12)
        done = [c.is_done for c in chunks]
        assert done == sorted(done, reverse=True)
        assert {c.module_id for c in chunks} == {"a0", "a1", "a2"}
        assert all(c.module_id == c.agent_id for c in chunks)
        assert {name: set(batch.agents) for name, batch in chunks.batches.items()} == {  # type: ignore[attr-defined]
            "a0": {"a0"}, "a1": {"a1"}, "a2": {"a2"}
        }  # fmt: skip
        assert chunks[0] is not None
        assert len(chunks[1:3]) == 2


@pytest.mark.parametrize("random_actions", [True, False])
def test_every_step_records_its_weights_explore_and_random_actions(random_actions: bool) -> None:
    with multi_runner(num_envs=2, env_config={"lengths": [50, 50]}) as sampler:
        module = sampler.modules["shared"]
        assert module is not None
        sampler.set_weights({"shared": read_weights(module)}, seq=4)
        for size in ({"num_timesteps": 8}, {"num_episodes": 1}):
            for c in sampler.sample(random_actions=random_actions, explore=False, **size):  # type: ignore[arg-type]
                assert (c.random_actions, c.explore) == (random_actions, False)
                assert set(c.weights_seq) <= {4}
                if len(c):
                    assert ("logp" in c.columns) is not random_actions


def test_an_action_pending_at_a_cut_keeps_the_weights_that_chose_it() -> None:
    class Slow(Together):
        """a1 sees only every third step."""

        def step(self, actions: dict[Any, Any]) -> Any:
            self.t += 1
            over = {"a0": False, "__all__": False}
            seen = {"a0": self.observe(0)} | ({"a1": self.observe(1)} if self.t % 3 == 0 else {})
            return seen, {"a0": 1.0, "a1": 1.0}, over, over, {}

    with multi_runner(Slow, rollout_fragment_length=4) as sampler:
        module = sampler.modules["shared"]
        assert module is not None
        first = sampler.sample_fragment()
        sampler.set_weights({"shared": read_weights(module)}, seq=9)
        second = sampler.sample_fragment()
        one, two = (next(c for c in part if c.agent_id == "a1") for part in (first, second))
        assert (one.env_t.tolist(), one.rewards.tolist(), one.obs[:, 0].tolist()) == ([0], [3.0], [0.0, 3.0])
        assert (two.env_t.tolist(), two.rewards.tolist(), two.obs[:, 0].tolist()) == ([3], [3.0], [3.0, 6.0])
        assert (two.weights_seq.tolist(), two.t_start, two.chunk_index) == ([0], 3, 1)
        assert sampler.totals.open == 1
        # Another learner's epoch: what hangs was chosen under the one before, and no batch may name two.
        sampler.set_weights({"shared": read_weights(module)}, seq=1, learner_epoch=2)
        assert sampler.weights_version == (0, 9)
        third = sampler.sample_fragment()
        assert sampler.weights_version == (2, 1)
        assert {c.end_reason for c in third if c.agent_id == "a1"} == {"reset"}
        assert sampler.totals.open == 0
        assert sampler.sample_fragment().batches["shared"].learner_epoch == 2


def test_metrics_count_env_steps_agents_and_modules() -> None:
    """Several agents on one module: its return is the sum of theirs."""
    settings = {"policies": {"m": None, "n": None}, "env_config": {"lengths": [2, 4, 4]}}
    with multi_runner(num_envs=2, policy_mapping_fn=lambda a, e: "n" if a == "a2" else "m", **settings) as sampler:
        assert not any(sampler.get_metrics()[name] for name in ("num_env_steps_sampled", "num_episodes"))
        sampler.sample(num_timesteps=12)
        metrics = sampler.get_metrics()
        assert sampler.take_finished_episodes() == [(3.0 + 14 + 18, 4)] * 2
    assert (metrics["num_env_steps_sampled"], metrics["num_episodes"]) == (12, 2)
    assert metrics["num_agent_steps_sampled"] == metrics["num_actions_by_agent"] == {"a0": 8, "a1": 12, "a2": 12}
    assert metrics["num_module_steps_sampled"] == {"m": 20, "n": 12}
    assert metrics["episode_return_mean"] == 35.0
    assert metrics["episode_len_mean"] == 4
    assert metrics["agent_episode_returns_mean"] == {"a0": 3.0, "a1": 14.0, "a2": 18.0}
    assert metrics["module_episode_returns_mean"] == {"m": 17.0, "n": 18.0}
    assert metrics["agent_steps"] == {"a0": 2, "a1": 4, "a2": 4}


def test_a_modules_batch_goes_over_the_wire_with_its_agents() -> None:
    with multi_runner(num_envs=2, env_config={"lengths": [3, 9]}) as sampler:
        sampler.sample(num_timesteps=4)
        batches: Any = sampler.sample(num_timesteps=4, force_reset=True, end_markers=True)
        batch = batches.batches["shared"]
        spaces = sampler.spaces["shared"]
    names = {"agents": list(batch.agents), "modules": list(batch.modules), "reasons": list(batch.reasons)}
    header = BatchHeader(
        fleet_id="f", slot=0, incarnation=0, seq=1, steps=batch.steps, chunks=len(batch), totals=WorkerTotals(), **names
    )
    _, received = decode_batch(encode_batch(batch, header), spaces.observation, spaces.action)
    ours, theirs = sorted(batch, key=_key), sorted(received, key=_key)
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert (one.agent_id, one.module_id, one.t_start, one.end_reason) == (
            other.agent_id, other.module_id, other.t_start, other.end_reason
        )  # fmt: skip
        np.testing.assert_array_equal(one.env_t, other.env_t)
        np.testing.assert_array_equal(one.obs, other.obs)


def _key(chunk: EpisodeChunk) -> Any:
    return chunk.episode_id, chunk.agent_id


def test_policies_may_be_a_set_and_rebuilt_modules_draw_new_random_numbers() -> None:
    with multi_runner(num_envs=2, policies={"a1", "a0"}, env_config={"lengths": [90, 90]}) as sampler:
        lives = []
        for _ in range(3):
            lives.append([c.actions.tolist() for c in sampler.sample(num_timesteps=80) if len(c)])
            sampler.make_module()
            sampler.make_env()
        assert lives[0] != lives[1] != lives[2] != lives[0]


def test_the_first_chunk_of_an_agent_first_seen_at_a_cut_has_its_info() -> None:
    class Late(Together):
        """a1 is seen for the first time after the second step, with an info."""

        def reset(self, **given: Any) -> Any:
            observations, infos = super().reset(**given)
            self.steps = 0
            self.waits = observations.pop("a1")
            return observations, infos

        def step(self, actions: Any) -> Any:
            late = {} if "a1" in actions else {"a1": 0}
            observations, rewards, terminateds, truncateds, infos = super().step({**actions, **late})
            self.steps += 1
            if self.steps < 2:
                for part in (observations, rewards):
                    part.pop("a1", None)
            if self.steps == 2:
                infos["a1"] = {"came": True}
            return observations, rewards, terminateds, truncateds, infos

    with multi_runner(Late, env_config={"lengths": [9, 9]}) as sampler:
        assert {c.agent_id for c in sampler.sample(num_timesteps=2)} == {"a0"}
        (chunk,) = (c for c in sampler.sample(num_timesteps=3) if c.agent_id == "a1")
        assert (chunk.chunk_index, chunk.infos[0]) == (0, {"came": True})
