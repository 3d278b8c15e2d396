"""The placeholder of an env that lives in another process or on another host."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.schemas.errors import EnvError


class EnvPlaceholder(gym.Env[Any, Any]):
    """Has the spaces of an env that lives in another process or on another host. It cannot be reset or stepped."""

    def __init__(self, index: int, spaces: tuple[Any, Any]) -> None:
        self.observation_space, self.action_space = spaces
        self._index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Raise `EnvError`."""
        raise out_of_reach(self._index)

    def step(self, action: Any) -> Any:
        """Raise `EnvError`."""
        raise out_of_reach(self._index)


def out_of_reach(index: int) -> EnvError:
    """Return the error for a call of an env that is out of reach."""
    return EnvError(
        f"env {index} lives in another process or on another host; take env_placement = 'inline' to reach it"
    )
