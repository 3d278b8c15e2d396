"""The random numbers that actions are made from: each row of a pass draws from a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import StateError
from headrace.workers.randomness.seeds import (
    BLOCK,
    NoiseBlocks,
    NoiseKind,
    NoiseUse,
    check_array,
    read_streams,
    write_streams,
)

StreamsOf = Callable[[NoiseUse], Iterable[np.random.Generator]]
"""The streams of some rows for a use, in the order of the rows."""


class RowNoise:
    """Numbers for rows with a pace of their own: float32 (rows, size) for one forward pass after another.

    A row's numbers depend on how often the row acted before, and not on how often its neighbours did.
    """

    def __init__(self, size: int, kind: NoiseKind) -> None:
        self.size, self.kind = size, kind
        self.streams: list[np.random.Generator] = []
        self._block = np.empty((0, BLOCK, size), np.float32)
        self._at: NDArray[np.intp] = np.empty(0, np.intp)
        self._every: NDArray[np.intp] = self._at
        self._polls_left = 0
        """No row can be used up before so many passes."""

    def add(self, streams: Iterable[np.random.Generator]) -> None:
        """Add rows after the existing ones."""
        new = list(streams)
        self.streams += new
        block = np.empty((len(self.streams), *self._block.shape[1:]), np.float32)
        block[: len(self._block)] = self._block
        self._block = block
        self._at = np.concatenate((self._at, np.full(len(new), BLOCK, np.intp)))
        self._every = np.arange(len(self._at))
        self._refill()

    def next(self, acting: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return numbers in [0, 1), or standard normal ones, for all rows. Only the rows `acting` use theirs up."""
        numbers: NDArray[np.float32] = self._block[self._every, self._at]
        if len(acting) == len(self._at):
            self._at += 1  # the usual case with one lane, and twice as fast
        else:
            self._at[acting] += 1
        self._polls_left -= 1
        if self._polls_left == 0:
            self._refill()
        return numbers

    def read(self) -> dict[str, Any]:
        """Return "numbers", float32 (rows, passes, size), drawn already, and "used", int64 (rows,), passes used up."""
        return {"numbers": self._block.copy(), "used": self._at.astype(np.int64)}

    def check(self, name: str, state: Any, rows: int) -> None:
        """Raise `StateError` unless `state`, called `name`, is that of `rows` rows of such noise."""
        check_array(state, name, "numbers", np.float32, (rows, BLOCK, self.size))
        used = check_array(state, name, "used", np.int64, (rows,))
        if (used < 0).any() or (used >= BLOCK).any():
            raise StateError(f"random_streams/{name}/used should be from 0 to below {BLOCK}, got {used!r:.80}")

    def write(self, rows: NDArray[np.intp], numbers: NDArray[np.float32], used: NDArray[np.int64]) -> None:
        """Continue `rows` from the state of `read`."""
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


class ActionNoise:
    """The numbers of one module's rows by use: its own policy's, and those of random actions.

    With `in_step` all rows act in every pass, and their number is fixed. Otherwise each row has its own pace, and rows
    may be added.
    """

    def __init__(self, streams_of: StreamsOf, *, in_step: bool) -> None:
        self._streams_of = streams_of
        self.in_step = in_step
        self.by_use: dict[NoiseUse, NoiseBlocks | RowNoise] = {}

    @property
    def rows(self) -> dict[NoiseUse, RowNoise]:
        """The numbers of rows with a pace of their own, by use."""
        return {use: noise for use, noise in self.by_use.items() if isinstance(noise, RowNoise)}

    def begin(self, use: NoiseUse, size: int, kind: NoiseKind) -> None:
        """Draw `size` numbers a row for `use` from now on."""
        streams = list(self._streams_of(use))
        if self.in_step:
            self.by_use[use] = NoiseBlocks(streams, size, kind)
            return
        self.by_use[use] = noise = RowNoise(size, kind)
        noise.add(streams)

    def begin_again(self) -> None:
        """Draw all numbers again, after the streams were set to another state."""
        for use, noise in list(self.by_use.items()):
            self.begin(use, noise.size, noise.kind)

    def forget(self, use: NoiseUse) -> None:
        """Stop drawing for `use`."""
        self.by_use.pop(use, None)

    def add(self, streams_of: StreamsOf) -> None:
        """Add rows, each with its streams, after the existing ones."""
        for use, noise in self.by_use.items():
            assert isinstance(noise, RowNoise), "rows that act in step are all there from the beginning"
            noise.add(streams_of(use))

    def draw(self, use: NoiseUse, acting: NDArray[np.intp] | None) -> NDArray[np.float32]:
        """Return float32 (rows, size) for the next pass, in which the rows `acting` (None: all) act."""
        noise = self.by_use[use]
        if isinstance(noise, NoiseBlocks):
            return noise.next()
        assert acting is not None, "only in lock-step do all rows act"
        return noise.next(acting)

    # -- state --------------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """Return the state of the numbers by use.

        streams: uint64 (rows, 6). ahead: float32 (passes, rows, size), drawn and not used yet. For rows with a pace of
        their own, the result of `RowNoise.read` takes the place of `ahead`.
        """
        return {use: {"streams": read_streams(noise.streams), **noise.read()} for use, noise in self.by_use.items()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` unless `write` can take `state`."""
        for use, noise in sorted(self.by_use.items()):  # in an order that does not depend on which use began first
            check_array(state.get(use), use, "streams", np.uint64, (len(noise.streams), 6))
            noise.check(use, state.get(use), len(noise.streams))

    def write(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `read`."""
        for use, noise in self.by_use.items():
            own = state[use]
            write_streams(noise.streams, own["streams"])
            if isinstance(noise, NoiseBlocks):
                noise.write(own["ahead"])
            else:
                noise.write(np.arange(len(noise.streams)), own["numbers"], own["used"])
