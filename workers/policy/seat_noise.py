"""Random numbers for seats, or lanes, that act each in its own time: each from a stream of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.workers.randomness.seeds import BLOCK


class SeatNoise:
    """float32 (rows, size) for one forward pass after another. What a seat gets depends on how often it acted before.

    Not on how often its neighbours did: agents that take turns act in polls of their own.
    """

    def __init__(self, size: int, kind: Literal["uniform", "normal"]) -> None:
        self.size, self.kind = size, kind
        self.streams: list[np.random.Generator] = []
        self._block = np.empty((0, BLOCK, size), np.float32)
        self._at: NDArray[np.intp] = np.empty(0, np.intp)
        self._every: NDArray[np.intp] = self._at
        self._polls_left = 0
        """No row can be used up before so many passes."""

    def add(self, streams: Iterable[np.random.Generator]) -> None:
        """More rows, below those there are."""
        new = list(streams)
        self.streams += new
        block = np.empty((len(self.streams), *self._block.shape[1:]), np.float32)
        block[: len(self._block)] = self._block
        self._block = block
        self._at = np.concatenate((self._at, np.full(len(new), BLOCK, np.intp)))
        self._every = np.arange(len(self._at))
        self._refill()

    def next(self, acting: NDArray[np.intp]) -> NDArray[np.float32]:
        """Numbers in [0, 1), or standard normal ones, for all rows; those of the rows `acting` are used up."""
        numbers: NDArray[np.float32] = self._block[self._every, self._at]
        if len(acting) == len(self._at):
            self._at += 1  # twice as fast, and all that one lane has to do
        else:
            self._at[acting] += 1
        self._polls_left -= 1
        if self._polls_left == 0:
            self._refill()
        return numbers

    def read(self) -> dict[str, Any]:
        """numbers: float32 (rows, passes, size), drawn already. used: int64 (rows,), for how many passes they were."""
        return {"numbers": self._block.copy(), "used": self._at.astype(np.int64)}

    def write(self, rows: NDArray[np.intp], numbers: NDArray[np.float32], used: NDArray[np.int64]) -> None:
        """Let `rows` go on as `read` found them."""
        self._block[rows], self._at[rows] = numbers, used
        self._polls_left = BLOCK - int(self._at.max(initial=0))

    def _refill(self) -> None:
        shape = self._block.shape[1:]
        for row in np.flatnonzero(self._at == BLOCK).tolist():
            stream = self.streams[row]
            normal = self.kind == "normal"
            self._block[row] = (stream.standard_normal if normal else stream.random)(shape, dtype=np.float32)
            self._at[row] = 0
        self._polls_left = BLOCK - int(self._at.max(initial=0))
