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
        assert batch.obs.shape[0] == batch.steps + len(batch)
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


class Learner:
    """A learner of RLlib's form that checks its episodes, and raises `EnoughError` at the third update."""

    def __init__(self) -> None:
        self._updates = 0

    def update(self, *, episodes: list[Any]) -> None:
        assert episodes
        for episode in episodes:
            episode.validate()
        self._updates += 1
        if self._updates == 3:
            raise EnoughError


STAND_INS: dict[str, Callable[[], Any]] = {"learner": Learner, "save": save, "train": train, "update": update}
