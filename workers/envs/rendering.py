"""The picture of one env."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.workers.envs.error_text import message_of

logger = logging.getLogger(__name__)


def render_at(env: Any, index: int) -> NDArray[np.uint8] | None:
    """Return the picture of env `index`, rgb uint8 (height, width, 3). `env` is that env, or its vector.

    Return None if it was not built with render_mode "rgb_array", or is down. After a failure log it and return None.
    """
    try:
        return picture_of(env, index)
    except Exception as error:  # noqa: BLE001 - a user's env
        warn_of(index, f"{type(error).__name__}: {message_of(error)}")
        return None


def picture_of(env: Any, index: int) -> NDArray[np.uint8] | None:
    """Return the same as `render_at`. Raises the env's own errors."""
    if getattr(env, "render_mode", None) != "rgb_array":
        return None
    frame = env.render()
    if isinstance(env, gym.vector.VectorEnv) and frame is not None:
        frame = frame[index]
    picture = np.asarray(frame) if frame is not None else None
    return picture if picture is not None and picture.ndim == 3 and picture.dtype == np.uint8 else None


def warn_of(index: int, problem: str) -> None:
    """Log why there is no picture of env `index`."""
    logger.warning("env %d could not be rendered (%s)", index, problem)
