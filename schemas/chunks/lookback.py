"""Lookback: the steps just before a chunk, for code that must see further back than the chunk's first observation.

They never mix with the chunk's own rows: they travel in columns of their own. Such a column is named "lookback/" and
the name of the step or observation column that it continues backwards. Chunk i owns the next `table["lookback"][i]`
rows of each, oldest first. Row k of "lookback/obs" is the observation before the action in row k of "lookback/actions".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOOKBACK = "lookback/"
"""Prefix of lookback columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Lookback:
    """n steps of the same agent and episode, oldest first; the chunk's first observation follows the last.

    Everything is as in `EpisodeChunk`, except that `obs` has n rows too: the observation before each action.
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    weights_seq: NDArray[np.int64]
    env_t: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rewards)
