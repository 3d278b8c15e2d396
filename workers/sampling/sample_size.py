"""The sizes that `sample` accepts."""

from __future__ import annotations

import numpy as np

from headrace.schemas.errors import ConfigError


class SampleSizeError(ConfigError, AssertionError):
    """`sample` was called with an invalid size."""


def check_size(num_timesteps: int | None, num_episodes: int | None) -> None:
    """Raise `SampleSizeError` if both sizes are given, or one is negative or not a whole number."""
    if num_timesteps is not None and num_episodes is not None:
        raise SampleSizeError(
            f"num_timesteps = {num_timesteps} and num_episodes = {num_episodes}: give only one of them"
        )
    for name, size in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise SampleSizeError(f"{name} = {size!r:.80} is no whole number; give an int")
        if size < 0:
            raise SampleSizeError(f"{name} = {size} is negative; give 0 or more")
