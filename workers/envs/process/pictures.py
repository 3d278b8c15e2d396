"""Pictures of envs as JSON, on their way from a process of envs to its driver."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.workers.envs.error_text import message_of
from headrace.workers.envs.rendering import picture_of, warn_of

LARGEST = 16 << 20
"""The largest picture, in bytes. A larger one would delay the other envs of the process too long."""


def picture_to_json(env: Any, lane: int) -> dict[str, Any]:
    """Return the picture of `env` as JSON, or why there is none."""
    try:
        picture = picture_of(env, lane)
    except Exception as error:  # noqa: BLE001 - a user's env
        return {"problem": f"{type(error).__name__}: {message_of(error)}"}
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
