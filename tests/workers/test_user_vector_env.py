"""A user's `VectorEnv` is sampled like separate envs, and an env that fails in it loses only its own episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError, EnvRestartBudgetError
from headrace.workers import EnvContext, VectorEnv
from headrace.workers.envs import restarts
from support.envs.toy import Counting, Faulty, Walk, check_books, runner


def _wrapped(env: Any) -> Any:
    return lambda context: VectorEnv.wrap(lambda index: env(context.at(index)), num_envs=context.num_envs)


def _rows(batch: Any) -> list[Any]:
    return [
        (c.episode_id, c.chunk_index, c.env_index, c.end, c.end_reason, c.seed, c.obs.tobytes(), c.actions.tobytes())
        for c in batch
    ]


def test_a_vector_env_gives_the_same_chunks_as_separate_envs() -> None:
    settings = {"num_envs": 3, "rollout_fragment_length": 40}
    with runner(Walk, **settings) as plain, runner(_wrapped(Walk), **settings) as sampler:
        for _ in range(4):
            assert _rows(sampler.sample_fragment()) == _rows(plain.sample_fragment())
        assert sampler.totals.episodes > 2


def test_a_failed_env_is_restarted_and_its_neighbours_stay_bit_identical() -> None:
    def diverge(answer: Any) -> Any:
        raise RuntimeError("diverged")

    def settings() -> dict[str, Any]:
        config = {"fault": diverge, "faulty": {1}, "every": 9, "steps": {}}
        return {"num_envs": 3, "rollout_fragment_length": 30, "env_config": config, "env_restart_attempts": 99}

    with runner(Faulty, **settings()) as plain, runner(_wrapped(Faulty), **settings()) as sampler:
        for _ in range(4):
            assert _rows(sampler.sample_fragment()) == _rows(plain.sample_fragment())
        assert sampler.totals.env_rebuilds == sampler.totals.env_failures > 3
        assert set(sampler.totals.discarded) == {"env_exception"}
        check_books(sampler)


class Abacus(VectorEnv):
    """Counts for all its envs at once. Env 1 answers step `at` with an error, `fails` times; step `end` raises."""

    def __init__(self, context: EnvContext) -> None:
        first = Counting(context)
        super().__init__(first.observation_space, first.action_space, context.get("width", context.num_envs))
        self.t = np.zeros(self.num_envs, np.int64)
        self.end = context.get("end", 10**9)
        self.skipped = 0
        self.restarted: list[int] = []
        self.closed = 0
        self.at, self.fails = context.get("at", 4), context.get("fails", 1)
        self.rows = context.get("rows")

    def observe(self) -> Any:
        return np.stack((self.t, np.arange(self.num_envs)), 1).astype(np.float32)

    def reset_at(self, index: int | None = None, *, seed: Any = None, options: Any = None) -> Any:
        self.t[index or 0] = 0
        return self.observe()[index or 0], {}

    def restart_at(self, index: int | None = None) -> None:
        self.restarted.append(index or 0)

    def vector_step(self, actions: Sequence[Any]) -> Any:
        self.skipped += actions.count(None)  # type: ignore[attr-defined]
        self.t += 1
        if (self.t == self.end).any():
            raise RuntimeError("all of us")
        seen: list[Any] = list(self.observe())
        if self.t[1] == self.at and len(self.restarted) < self.fails:
            seen[1] = RuntimeError("only me")
        rewards, ended = self.t.astype(np.float64), self.t == 6
        return (
            seen[: self.rows],
            rewards[: self.rows],
            ended[: self.rows],
            ~ended[: self.rows] & False,
            [{}] * len(seen),
        )

    def close(self) -> None:
        self.closed += 1


def test_a_vector_env_may_fail_for_one_env_or_for_all_envs() -> None:
    with runner(Abacus, num_envs=3, rollout_fragment_length=8) as sampler:
        batch = sampler.sample_fragment()
        abacus: Any = sampler.env.unwrapped  # type: ignore[union-attr]
        assert abacus.restarted == [1]
        assert sampler.totals.discarded == {"env_exception": 3}
        whole = [chunk for chunk in batch if chunk.end is ChunkEnd.TERMINATED]
        assert [(chunk.env_index, chunk.rewards.tolist()) for chunk in whole] == [
            (0, [1, 2, 3, 4, 5, 6]),
            (2, [1, 2, 3, 4, 5, 6]),
        ]
        check_books(sampler)
    assert abacus.closed == 1
    with (
        runner(Abacus, num_envs=3, env_config={"end": 2}, env_restart_attempts=2) as sampler,
        pytest.raises(EnvRestartBudgetError, match="all of us"),
    ):
        sampler.sample(num_timesteps=100)


def test_envs_that_wait_to_be_restarted_are_not_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 3600.0)
    config = {"at": 1, "fails": 2}
    with runner(Abacus, num_envs=3, env_config=config, rollout_fragment_length=5) as sampler:
        batch = sampler.sample_fragment()
        abacus: Any = sampler.env.unwrapped  # type: ignore[union-attr]
        assert abacus.restarted == [1]
        assert abacus.skipped == 3
        assert {chunk.env_index for chunk in batch} == {0, 2}


def test_a_wrong_number_of_envs_or_rows_is_refused_with_both_numbers() -> None:
    with pytest.raises(EnvContractError, match=r"num_envs of .*Abacus should be 3, as num_envs of the config .* got 2"):
        runner(Abacus, num_envs=3, env_config={"width": 2})
    with (
        runner(Abacus, num_envs=3, env_config={"rows": 2}, restart_failed_sub_environments=False) as sampler,
        pytest.raises(
            EnvContractError, match=r"answer of vector_step should be 5 of 3, got parts of \[2, 2, 2, 2, 3\] rows"
        ),
    ):
        sampler.sample(num_timesteps=3)
    with pytest.raises(EnvContractError, match="number of existing_envs should be 2, as num_envs says, got 3"):
        VectorEnv.wrap(existing_envs=[Counting(), Counting(), Counting()], num_envs=2)
    with pytest.raises(EnvContractError, match="should be 3, as num_envs says, or fewer and make_env, got 1"):
        VectorEnv.wrap(existing_envs=[Counting()], num_envs=3)


def test_a_method_that_a_vector_env_lacks_is_named_with_the_others() -> None:
    class Bare(VectorEnv):
        pass

    vector = Bare(None, None, 2)
    for call in (lambda: vector.reset_at(0), lambda: vector.restart_at(0), lambda: vector.vector_step([0, 0])):
        with pytest.raises(NotImplementedError, match=r"Bare has no \w+; a headrace\.VectorEnv has reset_at, re"):
            call()


def test_wrap_fills_up_with_new_envs_and_leaves_the_list_alone() -> None:
    asked: list[int] = []

    def make(index: int) -> Counting:
        asked.append(index)
        return Counting({"length": 2})

    mine = [Counting({"length": 9})]
    vector = VectorEnv.wrap(make, mine, num_envs=3)
    assert (len(mine), asked, vector.num_envs) == (1, [1, 2], 3)
    assert vector.observation_space is mine[0].observation_space
    assert vector.action_space is mine[0].action_space
    assert vector.get_sub_environments()[0] is mine[0] is vector.get_unwrapped()[0]
    observations, infos = vector.vector_reset(seeds=[5, 6, 7])
    assert [o.tolist() for o in observations] == [[0, 0]] * 3
    assert infos == [{}] * 3
    assert mine[0].seeds == [5]
    assert vector.reset_at()[0].tolist() == [0, 0]
    answer = vector.vector_step([0, 0, None])
    assert answer[1][:2] == (1.0, 1.0)
    assert answer[4] == ({}, {}, {})
    vector.restart_at(1)
    assert asked == [1, 2, 1]
    assert vector.try_render_at() is None
    vector.close()
    assert mine[0].closed == 1
    with pytest.raises(EnvContractError, match="given make_env too"):
        VectorEnv.wrap(existing_envs=mine).restart_at(0)


def test_a_malformed_step_answer_counts_as_a_failure_of_its_env() -> None:
    class Short(Counting):
        def step(self, action: Any) -> Any:
            return super().step(action)[:4] if self.index == 1 else super().step(action)

    with (
        runner(_wrapped(Short), num_envs=2, env_restart_attempts=1) as sampler,
        pytest.raises(EnvRestartBudgetError, match=r"answer of step should be \(obs, reward"),
    ):
        sampler.sample(num_timesteps=10)
    check_books(sampler)
