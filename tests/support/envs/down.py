"""Envs of which most are down for good."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

UP = 1
"""Of four."""


class Down(gym.Wrapper[Any, Any, Any, Any]):
    """Cannot be reset."""

    def reset(self, **settings: Any) -> Any:
        raise RuntimeError("no licence left")


def one_of_four(context: Any) -> gym.Env[Any, Any]:
    """CartPole; only the first of four envs ever comes up."""
    env = gym.make("CartPole-v1")
    return env if context.vector_index < UP else Down(env)
