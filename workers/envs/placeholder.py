"""What stands in a lane for an env that is elsewhere."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.schemas.errors import EnvError


class EnvPlaceholder(gym.Env[Any, Any]):
    """Stands for an env that lives in another process or on another host: has its spaces, and cannot be stepped."""

    def __init__(self, index: int, spaces: tuple[Any, Any]) -> None:
        self.observation_space, self.action_space = spaces
        self._index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise out_of_reach(self._index)

    def step(self, action: Any) -> Any:
        raise out_of_reach(self._index)


def out_of_reach(index: int) -> EnvError:
    """What is raised where somebody reaches for an env that is not here."""
    return EnvError(
        f"env {index} lives in another process or on another host; take env_placement = 'inline' to reach it"
    )
