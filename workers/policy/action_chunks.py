"""Modules that choose the actions of several steps in one pass, as robot policies do: an action chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.policy.acting import ACTION_CHUNK_STEP, Actor, BlockActor, Columns
from headrace.workers.policy.acting_device import ActingDevice
from headrace.workers.policy.module_protocol import action_chunk_size


class ActionChunks:
    """Plays the action chunks that `actor` makes, of `size` steps a row: each call is one step, and few make a pass.

        step of the row       0  1  2  3  4  5  6  7  8  9      size 4; an episode begins at step 6
        pass                  x           x     x     x
        action_chunk_step     0  1  2  3  0  1  0  1  0  1

    A row needs a pass where its episode begins, and at each `size`-th of its steps since all were reset. So rows that
    act together share their passes, whichever episodes end when, and the first chunk of an episode may be cut short.

    The columns have two more than the module's: `ACTION_CHUNK_STEP`, int64 (width,), and "weights_seq", int64 (width,),
    the number of the weights that made the row's chunk.
    """

    memory = None
    split = None

    def __init__(self, actor: Actor | BlockActor, size: int, width: int) -> None:
        self._actor = actor
        self._size = size
        self._every = np.arange(width)
        self._acted = np.zeros(width, np.int64)
        """The steps that each row has acted."""
        self._next = np.full(width, size, np.int64)
        """The step of its chunk that each row plays next; `size` where it has none."""
        self._seqs = np.zeros(width, np.int64)
        self._explores = False
        """True if the chunks were made with noise."""
        self._chunks: Columns = {}
        """The columns of the rows' chunks, (width, size, ...)."""

    def __call__(
        self, noise: NDArray[np.float32] | None, acting: NDArray[np.intp] | None, weights_seq: int, *, in_step: bool
    ) -> Columns:
        """Return the columns (width, ...) of a step by weights `weights_seq`; with `in_step` it counts for all rows."""
        if (noise is not None) is not self._explores:
            self._explores, self._chunks = noise is not None, {}
            self.drop(self._every)
        rows = self._every if acting is None else acting
        due = rows[(self._next[rows] == self._size) | (self._acted[rows] % self._size == 0)]
        if len(due):
            made = self._actor(noise, None if len(due) == len(self._every) else due)
            self._chunks = self._chunks or {name: np.zeros_like(column) for name, column in made.items()}
            for name, column in made.items():
                self._chunks[name][due] = column[due]
            self._next[due], self._seqs[due] = 0, weights_seq
        steps = np.minimum(self._next, self._size - 1)  # rows without a chunk do not act
        self._next[rows] += 1
        self._acted[... if in_step else rows] += 1
        columns = {name: column[self._every, steps] for name, column in self._chunks.items()}
        return columns | {ACTION_CHUNK_STEP: steps, "weights_seq": self._seqs.copy()}

    def drop(self, rows: NDArray[np.intp] | None) -> None:
        """Drop what is left of the chunks of `rows`. Each has a pass at its next step. None: all count from 0."""
        if rows is None:
            self._acted[:] = 0
        self._next[... if rows is None else rows] = self._size

    def follow(self, earlier: ActionChunks) -> None:
        """Go on with the rows of `earlier`, which had fewer."""
        known, self._explores = len(earlier._every), earlier._explores
        for own, other in ((self._acted, earlier._acted), (self._next, earlier._next), (self._seqs, earlier._seqs)):
            own[:known] = other
        for name, column in earlier._chunks.items():
            self._chunks[name] = np.zeros((len(self._every), *column.shape[1:]), column.dtype)
            self._chunks[name][:known] = column


def make_actor(
    module: Any,
    spaces: Spaces,
    columns: Mapping[str, NDArray[Any]],
    count_steps: Callable[[], int],
    blocks: Sequence[NDArray[np.intp]] = (),
    device: ActingDevice | None = None,
) -> Actor | BlockActor | ActionChunks:
    """Return what acts with `module` for all rows of `columns`. With `blocks`, each block of rows is one pass.

    The module is moved to `device`, if there is one. Raises `ModuleError` as `Actor` does.
    """
    parts = module, spaces, columns, count_steps
    actor = BlockActor(*parts, blocks, device) if blocks else Actor(*parts, device=device)
    size = action_chunk_size(module)
    return actor if size == 1 else ActionChunks(actor, size, len(next(iter(columns.values()))))
