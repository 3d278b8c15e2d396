"""The random numbers that the actions of a runner's lanes are made from, by use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.workers.policy.random_streams import LaneNoise, check_noise, read_noise, write_noise
from headrace.workers.policy.seat_noise import SeatNoise
from headrace.workers.randomness.seeds import NoiseBlocks, NoiseKind


class LaneNoises:
    """`in_step`: all lanes act in every pass, which is then a row for each."""

    def __init__(self, *, in_step: bool) -> None:
        self._in_step = in_step
        self._by_use: dict[str, LaneNoise] = {}

    def begin(self, use: str, streams: Sequence[np.random.Generator], size: int, kind: NoiseKind) -> None:
        """Draw numbers for `use` from now on, those of lane i from stream i alone."""
        if self._in_step:
            self._by_use[use] = NoiseBlocks(streams, size, kind)
            return
        self._by_use[use] = noise = SeatNoise(size, kind)
        noise.add(streams)

    def forget(self, use: str) -> None:
        """Nobody acts by these any more."""
        self._by_use.pop(use, None)

    def draw(self, use: str, acting: NDArray[np.intp] | None) -> NDArray[np.float32]:
        """float32 (lanes, size) for the next pass, in which the lanes `acting` (None: all) act."""
        noise = self._by_use[use]
        if isinstance(noise, NoiseBlocks):
            return noise.next()
        assert acting is not None, "only in lock-step do all lanes act"
        return noise.next(acting)

    def read(self) -> dict[str, Any]:
        """Where all of them stand."""
        return {use: read_noise(noise) for use, noise in self._by_use.items()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` unless `write` can take `state`."""
        for use, noise in sorted(self._by_use.items()):  # whichever began first
            check_noise(noise, use, state.get(use))

    def write(self, state: Mapping[str, Any]) -> None:
        """Go on as `read` found them."""
        for use, noise in self._by_use.items():
            write_noise(noise, state[use])
