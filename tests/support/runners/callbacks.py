"""Callbacks that write down what they are told, or raise."""

from __future__ import annotations

from collections import Counter
from typing import Any

from headrace.workers.callbacks import EVENTS

Told = list[tuple[str, dict[str, Any]]]


class Recording:
    """Writes down every event; instantiated once per runner."""

    def __init__(self) -> None:
        self.told: Told = []

    def __getattr__(self, event: str) -> Any:
        if event not in EVENTS:
            raise AttributeError(event)
        return lambda **arguments: self.told.append((event, arguments))


def count_events(told: Told) -> Counter[str]:
    """How often each event was told."""
    return Counter(event for event, _ in told)


def raise_at(event: str, at: int, env_index: int = 1) -> dict[str, Any]:
    """Raises in the `at`-th call of `event` for one env."""
    calls = Counter[int]()

    def raising(env_index: int) -> None:
        calls[env_index] += 1
        if env_index == chosen and calls[env_index] == at:
            raise RuntimeError("oops")

    chosen = env_index
    return {event: raising}


def always(**_: Any) -> None:
    """Raises whenever it is called."""
    raise KeyError("always")
