"""Callbacks to be named by their import path in a fleet's config."""

from __future__ import annotations

from typing import Any

sent: list[Any] = []
"""(episode id, chunk index, length) of each chunk that a worker says it has sent."""


class Sent:
    """Writes down what was sent."""

    def on_chunk_sent(self, chunk: Any) -> None:
        sent.append((chunk.episode_id, chunk.chunk_index, len(chunk)))


class SampleRaises:
    """Fails after the third fragment."""

    def __init__(self) -> None:
        self.fragments = 0

    def on_sample_end(self) -> None:
        self.fragments += 1
        if self.fragments == 3:
            raise RuntimeError("third fragment")


class ChunkRaises:
    """Fails at the first chunk."""

    def on_chunk_sent(self) -> None:
        raise RuntimeError("first chunk")


class StepRaises:
    """Fails in each third step."""

    def on_episode_step(self, episode: Any) -> None:
        if len(episode) == 3:
            raise RuntimeError("third step")


class CountsEpisodes:
    """Logs the number of episodes as a sum."""

    def on_episode_end(self, metrics_logger: Any) -> None:
        metrics_logger.log_value("episodes", 1, reduce="sum")
