"""Episode chunks: the record of what one agent experienced, and the table in which many of them travel.

A chunk is a contiguous part of one agent's episode: T steps and T+1 observations. The observation more is the one
after the last step, from which a learner bootstraps; at an episode's end it is the env's true final observation, never
the one of the next reset. T is never 0, except in an end marker (`ChunkEnd.ABORTED`), which says that the episode
will never finish and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class ChunkEnd(IntEnum):
    """How a chunk ends: the episode goes on, or it ended in one of three ways."""

    ONGOING = 0
    TERMINATED = 1
    TRUNCATED = 2
    ABORTED = 3


EXPLORE = 1
RANDOM_ACTIONS = 2

CHUNK_TABLE = np.dtype(
    [
        ("id_high", "<u8"),  # episode id, 128 bits
        ("id_low", "<u8"),
        ("seed", "<u8"),  # what the env's reset got
        ("t_start", "<i8"),  # env step of the episode at which the chunk starts
        ("episode_return", "<f8"),  # up to and including this chunk
        ("episode_length", "<i8"),  # likewise
        ("chunk_index", "<u4"),  # 0 for the first chunk of the episode
        ("length", "<u4"),  # T
        ("env_index", "<u4"),
        ("agent", "<u2"),  # indices into the batch header's lists
        ("module", "<u2"),
        ("reason", "<u2"),  # of ABORTED; 0 is none
        ("end", "|u1"),  # ChunkEnd
        ("flags", "|u1"),  # EXPLORE | RANDOM_ACTIONS
        ("lookback", "<u4"),  # rows before t_start that precede the chunk's own in every column
    ]
)
"""One row a chunk, in the order in which their steps stand in the batch's columns."""


def format_episode_id(high: int, low: int) -> str:
    """32 hexadecimal digits."""
    return f"{high:016x}{low:016x}"


@dataclass(slots=True, eq=False)
class EpisodeChunk:
    """T steps of one agent's episode. Arrays are views: of the sampler's buffers, or read-only of a received message.

    obs: (T+1, *shape), in the nesting of the observation space; actions: (T, *shape), likewise.
    rewards: float64 (T,). weights_seq, env_t: int64 (T,). columns: further per-step arrays (T, ...) such as `logp`,
    `values`, and `actions_for_env` where the env got something else than the policy's action.
    infos: T+1 dicts aligned with obs, or empty when no info had any content.
    """

    episode_id: str
    chunk_index: int
    t_start: int
    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    weights_seq: NDArray[np.int64]
    env_t: NDArray[np.int64]
    end: ChunkEnd
    end_reason: str | None = None
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    infos: list[dict[str, Any]] = field(default_factory=list)
    agent_id: str = "default_agent"
    module_id: str = "default_policy"
    env_index: int = 0
    slot: int = 0
    incarnation: int = 0
    seed: int = 0
    explore: bool = True
    random_actions: bool = False
    learner_epoch: int = 0
    weights_digest: str = ""
    episode_return: float = 0.0
    episode_length: int = 0

    def __len__(self) -> int:
        return len(self.rewards)

    def __bool__(self) -> bool:
        return True

    @property
    def is_done(self) -> bool:
        """The episode terminated or was truncated with this chunk."""
        return self.end in (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED)

    @property
    def is_terminated(self) -> bool:
        return self.end is ChunkEnd.TERMINATED

    @property
    def is_truncated(self) -> bool:
        return self.end is ChunkEnd.TRUNCATED

    def __repr__(self) -> str:
        steps = f"t={self.t_start}..{self.t_start + len(self)}"
        return f"EpisodeChunk({self.episode_id[:8]}#{self.chunk_index}, {steps}, {self.agent_id}, {self.end.name})"
