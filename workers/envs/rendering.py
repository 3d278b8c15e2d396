"""The picture of one env, and its JSON on the way from a process of envs to its driver."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import words_of

logger = logging.getLogger(__name__)

LARGEST = 16 << 20
"""Bytes of the largest picture that a process sends. A larger one would delay its other envs too long."""


def render_at(env: Any, index: int) -> NDArray[np.uint8] | None:
    """Return the picture of env `index`, rgb uint8 (height, width, 3). `env` is that env, or its vector.

    Return None if it was not built with render_mode "rgb_array", or is down. After a failure log it and return None.
    """
    try:
        return picture_of(env, index)
    except BaseException as error:  # noqa: BLE001 - a user's env
        raise_stop(error)
        warn_of(index, words_of(error))
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


def picture_to_json(env: Any, lane: int) -> dict[str, Any]:
    """Return the picture of `env` as JSON, or why there is none."""
    try:
        picture = picture_of(env, lane)
    except BaseException as error:  # noqa: BLE001 - a user's env
        raise_stop(error)
        return {"problem": words_of(error)}
    if picture is None:
        return {}
    if picture.nbytes > LARGEST:
        return {"problem": f"a picture of {picture.nbytes} bytes, where {LARGEST} are the most"}
    return {"shape": picture.shape, "rgb": base64.b64encode(np.ascontiguousarray(picture).data).decode()}


def picture_from_json(told: Mapping[str, Any], lane: int) -> NDArray[np.uint8] | None:
    """Return the picture as a read-only array, or None, with a warning if there was a problem."""
    if "problem" in told:
        warn_of(lane, told["problem"])
    if "rgb" not in told:
        return None
    return np.frombuffer(base64.b64decode(told["rgb"]), np.uint8).reshape(told["shape"])
