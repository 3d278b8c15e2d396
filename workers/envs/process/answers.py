"""What a driver's envs have answered since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.workers.envs.failures import Failure


@dataclass(slots=True, eq=False)
class Answers:
    """Lanes of the pool, each at most once in a list. What a lane sees and was rewarded with is in the columns."""

    stepped: list[int] = field(default_factory=list)
    ended: list[tuple[int, ChunkEnd]] = field(default_factory=list)
    """Of those that stepped, whose episode is over with it."""
    began: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(lane, info) of each reset; the observation waits in `first`."""
    built: list[int] = field(default_factory=list)
    """Restarts that succeeded."""
    failures: list[Failure] = field(default_factory=list)
    """These lanes have no env now. One that is in `ended` too failed in the reset that followed."""
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Non-empty infos of steps."""
    pictures: list[tuple[int, NDArray[np.uint8] | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stepped or self.began or self.built or self.failures or self.pictures)
