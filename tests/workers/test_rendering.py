"""One env's picture on demand, whatever kind of env it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from native_vectors import EVERY_KIND, vector_of
from toy_envs import Counting, runner

from headrace.workers import VectorEnv


class Painter(Counting):
    """A picture of its index and time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.render_mode = self.config.get("render_mode", "rgb_array")

    def render(self) -> Any:
        if self.t == 3:
            raise RuntimeError("no paint")
        return np.full((2, 3, 3), 10 * self.index + self.t, np.uint8)


def _wrapped(context: Any) -> VectorEnv:
    return VectorEnv.wrap(lambda index: Painter(context.at(index)), num_envs=context.num_envs)


KINDS = [Painter, _wrapped, *(vector_of(Painter, kind, mode) for kind, mode in EVERY_KIND)]


@pytest.mark.parametrize("env", KINDS)
def test_the_env_that_was_asked_for_is_shown_as_it_is_now(env: Any) -> None:
    with runner(env, num_envs=2) as sampler:
        sampler.sample(num_timesteps=4)
        shown = [sampler.try_render_at(), sampler.try_render_at(1)]
        assert [picture is not None and picture.tolist() for picture in shown] == [
            np.full((2, 3, 3), value).tolist() for value in (2, 12)
        ]


@pytest.mark.parametrize("env", [Painter, _wrapped, vector_of(Painter, "sync", AutoresetMode.DISABLED)])
def test_what_cannot_be_shown_is_none_and_sampling_goes_on(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    with runner(env, num_envs=1, env_config={"render_mode": None}) as sampler:
        sampler.sample(num_timesteps=1)
        assert sampler.try_render_at(0) is None
    with runner(env, num_envs=1) as sampler:
        sampler.sample(num_timesteps=3)
        assert sampler.try_render_at(0) is None
        assert "could not be rendered (RuntimeError: no paint)" in caplog.text
        sampler.sample(num_timesteps=1)
        assert sampler.try_render_at(0) is not None
