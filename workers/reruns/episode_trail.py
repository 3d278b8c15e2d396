"""The steps of open episodes that were cut already, kept by reference, so that an episode that fails can be repeated.

    cut 0  ▮▮▮▮▮▮▮▮   cut 1  ▮▮▮▮▮▮▮▮   open fragment  ▮▮▮            a failed episode: its rows in each of them

A step costs nothing, and a cut costs one object for each open episode. Rows are read when an episode has failed. A cut
is let go with the last of its episodes, or by `MOST_BYTES`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import is_obs_column
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.envs.actions import action_root
from headrace.workers.envs.lane import Episode
from headrace.workers.sampling.cutting import Columns
from headrace.workers.sampling.fragment import OpenChunk

MOST_BYTES = 32 << 20
"""The most bytes of cuts that a runner keeps. Beyond it the oldest cuts lose their observations, then all steps."""


@dataclass(slots=True, eq=False)
class FailedEpisode:
    """An episode that failed, as it can be repeated; `problem` says in words why it cannot, "" if it can."""

    seed: int
    """Seed of its reset, or UNSEEDED."""
    steps: int
    """Number of actions that the env was sent, the one at which it failed included."""
    problem: str = ""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The env's actions and "rewards", (steps, ...); the last reward has no meaning. "obs/...": uint64, digests of the
    observations before the last steps; empty where connectors change observations.

    Of several agents, "N/..." are those of agent N of possible_agents, a row for each of its actions. "N/env_t" is the
    env step of each. A reward is the sum until the agent is observed again."""


AgentRows = tuple[int, Episode, Columns, tuple[int, slice], bool]
"""An agent's place in possible_agents, its episode, a fragment's columns, its rows there, and `shows_all`."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Cut:
    columns: dict[str, NDArray[np.generic]]

    def drop(self, *, all_steps: bool) -> None:
        self.columns = {} if all_steps else {n: column for n, column in self.columns.items() if not is_obs_column(n)}


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`steps` steps of an episode in a cut, from row `start` on. Their observations begin at row `first`."""

    cut: _Cut
    start: int
    first: int
    steps: int


class Trail:
    """The cuts of the open episodes of a runner. `shows_all`: a cut has the observations as the env gave them."""

    def __init__(self) -> None:
        self._seen = OrderedDict[weakref.ref[_Cut], int]()
        """The cuts that have observations, the oldest first, and their bytes of these."""
        self._cuts = OrderedDict[weakref.ref[_Cut], int]()
        """The cuts, the oldest first, and their bytes of other columns."""
        self._nbytes = 0

    def add(
        self,
        columns: Columns,
        chunks: Sequence[OpenChunk],
        shows_all: bool,
        goes_on: Callable[[OpenChunk], bool] = lambda chunk: chunk.end is ChunkEnd.ONGOING,
    ) -> None:
        """Keep those of the cut `columns` that repeat steps, for the `chunks` in them whose episodes go on."""
        cut, start = _Cut(_needed(columns, shows_all)), 0
        for index, chunk in enumerate(chunks):
            steps, trail = chunk.stop - chunk.start, chunk.episode.trail
            if trail and not trail[0].cut.columns:
                del trail[1:]  # without its first steps the episode cannot be repeated
            elif goes_on(chunk):
                trail.append(Piece(cut, start, start + index, steps))
            start += steps
        ref = weakref.ref(cut, self._forget)
        seen = sum(column.nbytes for name, column in cut.columns.items() if is_obs_column(name))
        self._seen[ref], self._cuts[ref] = seen, sum(column.nbytes for column in cut.columns.values()) - seen
        self._nbytes += seen + self._cuts[ref]
        del cut  # it is let go if no episode goes on
        for kept, all_steps in ((self._seen, False), (self._cuts, True)):
            while kept and self._nbytes > MOST_BYTES:
                ref, nbytes = kept.popitem(last=False)
                self._nbytes -= nbytes
                if (oldest := ref()) is not None:
                    oldest.drop(all_steps=all_steps)

    def _forget(self, cut: weakref.ref[_Cut]) -> None:
        self._nbytes -= self._seen.pop(cut, 0) + self._cuts.pop(cut, 0)

    def of(self, episode: Episode, columns: Columns, where: tuple[int, slice], shows_all: bool) -> FailedEpisode:
        """Return the episode, which failed at the last of the rows `where` (lane, rows) in a fragment's `columns`.

        Its observations are those from the oldest on after which none was let go.
        """
        steps = episode.steps + where[1].stop - where[1].start
        return _failed(episode, steps, [("", episode, columns, where, shows_all)])

    def of_agents(self, episode: Episode, steps: int, agents: Iterable[AgentRows]) -> FailedEpisode:
        """Return the episode of several agents, which failed at env step `steps`. See `of`."""
        return _failed(episode, steps, [(f"{agent}/", *rest) for agent, *rest in agents])


def _failed(episode: Episode, steps: int, owners: Sequence[tuple[Any, ...]]) -> FailedEpisode:
    failed, arrays = FailedEpisode(episode.seed, steps), dict[str, NDArray[Any]]()
    for prefix, own, columns, where, shows_all in owners:
        parts = [_rows(piece) for piece in own.trail]
        if (rows := where[1].stop - where[1].start) > 0:
            parts.append({name: column[where] for name, column in _needed(columns, shows_all).items()})
        if sum(len(part.get("rewards", ())) for part in parts) != own.steps + rows:
            failed.problem = f"its first steps are no longer known: a worker keeps {MOST_BYTES >> 20} MiB of them"
            break
        arrays |= {prefix + name: column for name, column in (_joined(parts) if parts else {}).items()}
    if episode.reset_seed is None:
        failed.problem = "its reset got no seed, so it depends on the episodes before; set seed_every_episode = true"
    if not failed.problem:
        failed.arrays = arrays
    return failed


def _needed(columns: Columns, shows_all: bool) -> dict[str, NDArray[np.generic]]:
    """Return the env's actions as "actions", the rewards, and the observations if these are the env's own."""
    root, needed = action_root(columns), {}
    for name, column in columns.items():
        first, slash, rest = name.partition("/")
        if first == root:
            needed["actions" + slash + rest] = column
        elif name in ("rewards", "env_t") or (shows_all and is_obs_column(name)):
            needed[name] = column
    return needed


def _rows(piece: Piece) -> dict[str, NDArray[np.generic]]:
    """Return the rows of a piece: a row for each step, with the observation before it."""
    rows = {}
    for name, column in piece.cut.columns.items():
        first = piece.first if is_obs_column(name) else piece.start
        rows[name] = column[first : first + piece.steps]
    return rows


def _joined(parts: Sequence[Mapping[str, NDArray[np.generic]]]) -> dict[str, NDArray[np.generic]]:
    """Return the rows of all parts in one array for each name, and digests in the place of observations."""
    joined = {}
    for name in parts[-1]:
        lacking = max((number for number, part in enumerate(parts) if name not in part), default=-1)
        rows = [part[name] for part in parts[lacking + 1 :]]
        joined[name] = np.concatenate([digests(part) for part in rows] if is_obs_column(name) else rows)
    return joined


def digests(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return the XXH3 checksum of the bytes of each row, uint64 (rows,)."""
    return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], np.uint64)
