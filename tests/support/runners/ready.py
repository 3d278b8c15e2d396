"""Settings under which envs step when they are ready, and what they live through."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.workers import SingleAgentEnvRunner
from headrace.workers.connectors import FlattenObservations, FrameStack, PreviousActionReward
from support.runners.recurrent import LSTM

PIECES = [partial(FrameStack, 3), PreviousActionReward, FlattenObservations]
READY: dict[str, dict[str, Any]] = {
    "at once": {"remote_env_batch_wait_ms": 0},
    "after a wait": {"remote_env_batch_wait_ms": 2},
    "by halves": {"double_buffering": True},
}


def pieced(chunks: Iterable[EpisodeChunk]) -> dict[str, list[EpisodeChunk]]:
    """Chunks by episode, in order, without a gap."""
    parts: dict[str, list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.episode_id].append(chunk)
    for episode in parts.values():
        to_episode(episode)  # which compares what meets at the seams
    return parts


def pieced_as_far(sampler: SingleAgentEnvRunner, chunks: Iterable[EpisodeChunk]) -> dict[str, list[EpisodeChunk]]:
    """Sample fragments until each env has taken as many steps as in `chunks`; return the sampled chunks by episode.

    How many steps an env takes while others take theirs differs from run to run.
    """
    missing: Counter[int] = Counter()
    for chunk in chunks:
        missing[chunk.env_index] += len(chunk)
    sampled: list[EpisodeChunk] = []
    while missing := +missing:
        for chunk in sampler.sample_fragment():
            missing[chunk.env_index] -= len(chunk)
            sampled.append(chunk)
    return pieced(sampled)


def life(parts: list[EpisodeChunk]) -> list[tuple[Any, ...]]:
    """Every step of an episode."""
    steps = []
    for chunk in parts:
        for t in range(len(chunk)):
            seen = chunk.obs[t].tobytes(), chunk.actions[t].tobytes(), chunk.rewards[t], chunk.obs[t + 1].tobytes()
            columns = {name: column[t].tobytes() for name, column in chunk.columns.items()}
            steps.append((*seen, columns, chunk.infos[t], chunk.infos[t + 1]))
    return steps


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"module": LSTM},
    "connectors": {"env_to_module": PIECES, "module": LSTM},
    "whole episodes": {"batch_mode": "complete_episodes", "module": LSTM},
    "callbacks": {"callbacks": [{"on_episode_created": lambda episode: None}]},
}
