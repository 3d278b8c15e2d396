"""Stand-ins for the reader's own code on a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson


class EnoughError(Exception):
    """A loop of a page has run often enough."""


def train() -> Callable[..., None]:
    """Return a `train` that checks its batches and raises `EnoughError` at the third."""
    seen = []

    def train(module: Any, batch: Any) -> None:
        assert batch.columns["obs"].shape[0] == batch.steps + len(batch)
        assert sum(map(len, batch)) == batch.steps
        seen.append(batch)
        if len(seen) == 3:
            raise EnoughError

    return train


def save() -> Callable[[dict[str, Any]], None]:
    """Return a `save` that only checks that JSON can hold the position of the checkpoint."""

    def save(checkpoint: dict[str, Any]) -> None:
        assert orjson.dumps(checkpoint["position"])

    return save


def update() -> Callable[..., None]:
    """Return an `update` that takes any steps with a length, and raises `EnoughError` at the third."""
    seen = []

    def update(module: Any, steps: Any) -> None:
        assert len(steps)
        seen.append(steps)
        if len(seen) == 3:
            raise EnoughError

    return update


STAND_INS: dict[str, Callable[[], Any]] = {"save": save, "train": train, "update": update}
