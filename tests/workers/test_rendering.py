"""A rendered picture of one env on demand, for every kind of env."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from headrace.workers import VectorEnv
from support.envs.native_vectors import EVERY_KIND, vector_of
from support.envs.painters import Painter, TallPainter
from support.envs.toy import check_books, runner
from support.waiting import wait_until


def _wrapped(context: Any) -> VectorEnv:
    return VectorEnv.wrap(lambda index: Painter(context.at(index)), num_envs=context.num_envs)


KINDS = [Painter, _wrapped, *(vector_of(Painter, kind, mode) for kind, mode in EVERY_KIND)]


@pytest.mark.parametrize("env", KINDS)
def test_try_render_at_gives_the_current_picture_of_the_env_at_the_index(env: Any) -> None:
    with runner(env, num_envs=2) as sampler:
        sampler.sample(num_timesteps=4)
        shown = [sampler.try_render_at(), sampler.try_render_at(1)]
        assert [picture is not None and picture.tolist() for picture in shown] == [
            np.full((2, 3, 3), value).tolist() for value in (2, 12)
        ]


@pytest.mark.parametrize("env", [Painter, _wrapped, vector_of(Painter, "sync", AutoresetMode.DISABLED)])
def test_an_env_that_cannot_render_gives_none_and_sampling_goes_on(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    with runner(env, num_envs=1, env_config={"render_mode": None}) as sampler:
        sampler.sample(num_timesteps=1)
        assert sampler.try_render_at(0) is None
    with runner(env, num_envs=1) as sampler:
        sampler.sample(num_timesteps=3)
        assert sampler.try_render_at(0) is None
        assert "could not be rendered (RuntimeError: no paint)" in caplog.text
        sampler.sample(num_timesteps=1)
        assert sampler.try_render_at(0) is not None


PROCESSES = {"env_placement": "process", "envs_per_process": 2}


def test_an_env_in_a_process_renders_like_an_inline_env(caplog: pytest.LogCaptureFixture) -> None:
    with runner("support.envs.painters:Painter", num_envs=3, **PROCESSES) as sampler:
        sampler.sample(num_timesteps=6)
        for index in (2, 0, 1, 1):
            picture = sampler.try_render_at(index)
            assert picture is not None
            assert picture.tolist() == np.full((2, 3, 3), 10 * index + 2).tolist()
        chunks = sampler.sample(num_timesteps=3)
        assert [chunk.obs[0, 0] for chunk in chunks] == [2.0] * 3, "pictures are no steps"
        assert sampler.try_render_at(0) is None
        assert "env 0 could not be rendered (RuntimeError: no paint)" in caplog.text
    with runner("support.envs.painters:Painter", env_config={"render_mode": None}, **PROCESSES) as sampler:
        sampler.sample(num_timesteps=1)
        assert sampler.try_render_at(0) is None


def _steps_of(sampler: Any, index: int) -> int:
    return sum(len(chunk) for chunk in sampler.sample(num_timesteps=1) if chunk.env_index == index)


def test_a_picture_too_large_gives_none_and_a_hanging_render_fails_its_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"num_envs": 3, "env_placement": "process", "envs_per_process": 3, "env_step_timeout_s": 1.0}
    with runner("support.envs.painters:TallPainter", **settings) as sampler:
        sampler.sample(num_timesteps=3)
        assert sampler.try_render_at(1) is None
        assert "env 1 could not be rendered (a picture of 27000000 bytes, where 16777216 are the most)" in caplog.text
        assert [sampler.try_render_at(index) for index in (2, 0)] == [None, None]
        wait_until(lambda: _steps_of(sampler, 0) > 0, what="steps of env 0")
        assert sampler.try_render_at(0) is not None
        assert sampler.totals.env_failures == 1
        check_books(sampler)
    assert "did not return from render within env_step_timeout_s = 1 s" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("sampled", [True, False])
def test_a_hanging_render_rebuilds_a_vector_of_processes(sampled: bool, caplog: pytest.LogCaptureFixture) -> None:
    with runner(TallPainter, num_envs=3, gym_env_vectorize_mode="async", env_step_timeout_s=2.0) as sampler:
        if sampled:
            sampler.sample(num_timesteps=3)
        first: Any = sampler.env
        assert sampler.try_render_at(0) is None
        assert "did not return from render within env_step_timeout_s = 2 s" in caplog.text
        assert len(sampler.sample(num_timesteps=12))
        assert sampler.totals.env_failures == 1
        assert not any(process.is_alive() for process in first.processes)
        check_books(sampler)
