"""Episode chunks: the record of one agent's experience, and the table row that describes a chunk in a batch.

A chunk is a contiguous part of one agent's episode: T steps and T+1 observations. The extra observation is the one
after the last step, from which a learner bootstraps. At an episode's end it is the env's true final observation, never
the first one after the next reset.

T is never 0, except in an end marker (`ChunkEnd.ABORTED`). An end marker says that the episode will never finish, and
why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.printable import one_line
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import ChunkError


class ChunkEnd(IntEnum):
    """The end of a chunk: the episode goes on, or it ended in one of three ways."""

    ONGOING = 0
    TERMINATED = 1
    TRUNCATED = 2
    ABORTED = 3


DEFAULT_AGENT = "default_agent"
"""The agent of an env that has one."""

UNSEEDED = 2**64 - 1
"""Stands in the seed field when the env was reset without a seed. Larger than any seed."""

EXPLORE = 1
RANDOM_ACTIONS = 2

CHUNK_TABLE = np.dtype(
    [
        ("id_high", "<u8"),  # episode id, 128 bits
        ("id_low", "<u8"),
        ("seed", "<u8"),  # what the env's reset got, or UNSEEDED
        ("t_start", "<i8"),  # env step of the episode at which the chunk starts
        ("episode_return", "<f8"),  # sum of rewards up to and including this chunk
        ("episode_length", "<i8"),  # steps up to and including this chunk
        ("chunk_index", "<u4"),  # 0 for the first chunk of the episode
        ("length", "<u4"),  # T
        ("env_index", "<u4"),
        ("agent", "<u2"),  # indices into the batch header's lists
        ("module", "<u2"),
        ("reason", "<u2"),  # why the episode was ABORTED; 0 is no reason
        ("end", "|u1"),  # ChunkEnd
        ("flags", "|u1"),  # EXPLORE | RANDOM_ACTIONS
        ("lookback", "<u4"),  # rows of lookback columns: see LOOKBACK
    ]
)
"""One row for each chunk, in the order in which their steps stand in the batch's columns."""


LOOKBACK = "lookback/"
"""Prefix of lookback columns, for code that must see further back than a chunk's first observation.

Such a column has the name of the step or observation column that it continues backwards. Chunk i owns the next
`table["lookback"][i]` rows of each, oldest first. Row k of "lookback/obs" is the observation before the action in row k
of "lookback/actions". They never mix with the chunk's own rows.
"""


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

    def __repr__(self) -> str:
        return arrays_in_words(self)


def format_episode_id(high: int, low: int) -> str:
    """Write an episode id as 32 hexadecimal digits."""
    return f"{high:016x}{low:016x}"


@dataclass(slots=True, eq=False)
class EpisodeChunk:
    """T steps of one agent's episode.

    Arrays are views: of the sampler's buffers, or read-only ones of a received message.

    - obs: (T+1, *shape), in the nesting of the observation space.
    - actions: (T, *shape), in the nesting of the module's action space and in its units, also where actions are random.
      Random actions are drawn from that space, and reach the env in the same way as the policy's.
    - rewards: float64 (T,). weights_seq, env_t: int64 (T,).
    - columns: further per-step arrays (T, ...) such as `logp` and `values`. `actions_for_env`, in the env's units,
      exists where the module or its connectors convert `actions` for the env; elsewhere the env got `actions`.
    - infos: T+1 dicts aligned with obs; empty when no info had any content.
    - state_in: a recurrent module's memory before the first step, by name, one row without a leading axis. Empty for
      other modules, and for a cut that begins within a chunk, where the memory is not known.
    - lookback: the steps just before, at most `episode_lookback_horizon`; None if there are none.
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
    state_in: dict[str, NDArray[Any]] = field(default_factory=dict)
    lookback: Lookback | None = None
    agent_id: str = DEFAULT_AGENT
    module_id: str = "default_policy"
    env_index: int = 0
    slot: int = 0
    incarnation: int = 0
    seed: int | None = 0
    """The seed for the reset of the env, or of the vector that it is part of.

    None: the env began this episode without a seed, with its own random numbers. This holds for all but the first
    episode of an env where `seed_every_episode` is false, for envs that a vector resets by itself, and for external
    envs.
    """
    explore: bool = True
    random_actions: bool = False
    learner_epoch: int = 0
    weights_digest: str = ""
    episode_return: float = 0.0
    episode_length: int = 0
    task: Task | None = None
    """The task of the whole episode, in force since its reset; None if it began without one."""

    def __len__(self) -> int:
        return len(self.rewards)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, steps: slice) -> EpisodeChunk:
        """Return the steps `a` to `b` of `chunk[a:b]`, counted from the chunk's own first step, as a chunk of views.

        A cut that ends before this chunk does is ONGOING. A cut that begins after its first step has no lookback: the
        steps before it are in the rest of this chunk. Raises `ChunkError` for a cut without a step, or with a stride.
        """
        if not isinstance(steps, slice):
            raise TypeError(f"a chunk takes a slice, as in chunk[2:5], not {steps!r:.40}")
        start, stop, stride = steps.indices(len(self))
        if stride != 1 or start >= stop:
            raise ChunkError(f"{self!r}[{steps.start}:{steps.stop}:{steps.step}] is no contiguous run of steps")
        if stop - start == len(self):
            return replace(self)
        rest = len(self) - stop
        return replace(
            self,
            t_start=self.t_start if start == 0 else int(self.env_t[start]),
            obs=map_arrays(lambda leaf: leaf[start : stop + 1], self.obs),
            actions=map_arrays(lambda leaf: leaf[start:stop], self.actions),
            rewards=self.rewards[start:stop],
            weights_seq=self.weights_seq[start:stop],
            env_t=self.env_t[start:stop],
            end=ChunkEnd.ONGOING if rest else self.end,
            end_reason=None if rest else self.end_reason,
            columns={name: column[start:stop] for name, column in self.columns.items()},
            infos=self.infos[start : stop + 1],
            state_in={} if start else self.state_in,
            lookback=None if start else self.lookback,
            episode_return=self.episode_return - float(self.rewards[stop:].sum()),
            episode_length=self.episode_length - rest,
        )

    @property
    def is_done(self) -> bool:
        """Return whether the episode terminated or was truncated with this chunk."""
        return self.end in (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED)

    @property
    def is_terminated(self) -> bool:
        """Return whether the episode terminated with this chunk."""
        return self.end is ChunkEnd.TERMINATED

    @property
    def is_truncated(self) -> bool:
        """Return whether the episode was truncated with this chunk."""
        return self.end is ChunkEnd.TRUNCATED

    def __repr__(self) -> str:
        steps = f"t={self.t_start}..{self.t_start + len(self)}"
        return f"EpisodeChunk({self.episode_id[:8]}#{self.chunk_index}, {steps}, {self.agent_id}, {self.end.name})"


def to_episode(chunks: Iterable[EpisodeChunk]) -> EpisodeChunk:
    """Join the chunks of one agent's episode, given in any order, into a single chunk. Its arrays are copies.

    The result ends as the last chunk does, which may be an ABORTED marker. `learner_epoch` and `weights_digest` are
    those of the last chunk, while `weights_seq` covers every step. `explore` and `random_actions` say whether any step
    was so. Lookback is that of the first chunk, so a whole episode has none. Where some chunks have random actions and
    others a policy's, columns that only one kind has ("logp") are left out.

    Raises `ChunkError` and names what differs: ids, a gap or an overlap, observations at a boundary, columns.
    """
    parts = sorted(chunks, key=lambda chunk: (chunk.chunk_index, chunk.t_start))
    if not parts:
        raise ChunkError("no chunk was given to make an episode of")
    for before, after in pairwise(parts):
        _check_adjacent(before, after)
    first, last = parts[0], parts[-1]
    bodies = [chunk for chunk in parts if len(chunk)] or [first]
    heads = [map_arrays(lambda array: array[:-1], chunk.obs) for chunk in bodies[:-1]]
    shared = [name for name in bodies[0].columns if all(name in chunk.columns for chunk in bodies)]
    return replace(
        first,
        obs=_joined([*heads, bodies[-1].obs]),
        actions=_joined([chunk.actions for chunk in bodies]),
        rewards=np.concatenate([chunk.rewards for chunk in bodies]),
        weights_seq=np.concatenate([chunk.weights_seq for chunk in bodies]),
        env_t=np.concatenate([chunk.env_t for chunk in bodies]),
        end=last.end,
        end_reason=last.end_reason,
        columns=_joined([{name: chunk.columns[name] for name in shared} for chunk in bodies]),
        infos=_joined_infos(bodies),
        explore=any(chunk.explore for chunk in bodies),
        random_actions=any(chunk.random_actions for chunk in bodies),
        learner_epoch=last.learner_epoch,
        weights_digest=last.weights_digest,
        episode_return=last.episode_return,
        episode_length=last.episode_length,
    )


def map_arrays(change: Callable[..., Any], *trees: Any) -> Any:
    """Apply `change` to the arrays at the same place of all `trees` (dicts, tuples, arrays); return the results."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: map_arrays(change, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_arrays(change, *parts) for parts in zip(*trees, strict=True))
    return change(*trees)


def shapes_in_words(trees: Mapping[str, Any]) -> str:
    """Return names and shapes of the arrays in `trees` of dicts and tuples: one line of at most 300 characters."""
    named = (pair for name, tree in trees.items() for pair in _named_arrays(tree, name))
    return one_line(", ".join(f"{name} {tuple(array.shape)}" for name, array in named))[:300]


def arrays_in_words(view: Any) -> str:
    """Return the names and shapes of the arrays of a dataclass, for its repr."""
    named = {field.name: getattr(view, field.name) for field in fields(view)}
    return f"<{type(view).__name__}: {shapes_in_words(named)}>"


def _joined(parts: Sequence[Any]) -> Any:
    """Join arrays one after another, keeping their nesting."""
    return map_arrays(lambda *arrays: np.concatenate(arrays), *parts)


def _joined_infos(chunks: Sequence[EpisodeChunk]) -> list[dict[str, Any]]:
    """Join the infos of T+1 observations each; return an empty list when no chunk has any."""
    if not any(chunk.infos for chunk in chunks):
        return []
    joined: list[dict[str, Any]] = [{}]
    for chunk in chunks:
        infos = chunk.infos or [{}] * (len(chunk) + 1)
        joined[-1] = joined[-1] or infos[0]
        joined += infos[1:]
    return joined


def _check_adjacent(before: EpisodeChunk, after: EpisodeChunk) -> None:
    """Raise `ChunkError` unless `after` goes on where `before` was cut."""
    for name in ("episode_id", "agent_id", "module_id"):
        ours, theirs = getattr(before, name), getattr(after, name)
        if ours != theirs:
            raise ChunkError(f"{before!r} and {after!r} differ in {name}: {ours!r} and {theirs!r}")
    if before.end is not ChunkEnd.ONGOING:
        raise ChunkError(f"{before!r} has ended, so that {after!r} cannot follow it")
    begins = after.episode_length - len(after)
    if begins != before.episode_length:
        what = "a gap" if begins > before.episode_length else "an overlap"
        raise ChunkError(
            f"{what} between {before!r} and {after!r}: {before.episode_length} steps are known of the episode, and "
            f"{begins} lie before the latter"
        )
    if len(before) and len(after):
        _check_seam(before, after)


def _check_seam(before: EpisodeChunk, after: EpisodeChunk) -> None:
    _check_alike("observations", before.obs, after.obs, before, after)
    _check_alike("actions", before.actions, after.actions, before, after)
    ours, theirs = before.columns, after.columns
    if before.random_actions != after.random_actions:  # only a policy's chunk has the policy's columns
        ours = {name: column for name, column in ours.items() if name in theirs}
        theirs = {name: theirs[name] for name in ours}
    _check_alike("columns", ours, theirs, before, after)
    last, first = dict(_named_arrays(before.obs, "obs")), dict(_named_arrays(after.obs, "obs"))
    for name, column in last.items():
        newest, oldest = column[-1], first[name][0]
        if not np.array_equal(newest, oldest, equal_nan=column.dtype.kind == "f"):
            raise ChunkError(
                f"{before!r} and {after!r} share an observation, and {name!r} is not the same in it: "
                f"{newest!r:.80} and {oldest!r:.80}"
            )


def _check_alike(what: str, ours: Any, theirs: Any, before: EpisodeChunk, after: EpisodeChunk) -> None:
    mine = {name: (array.dtype.str, array.shape[1:]) for name, array in _named_arrays(ours, what)}
    other = {name: (array.dtype.str, array.shape[1:]) for name, array in _named_arrays(theirs, what)}
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            raise ChunkError(
                f"{before!r} and {after!r} differ in {name!r}: {mine.get(name, 'absent')} and "
                f"{other.get(name, 'absent')} (dtype, shape of a row)"
            )


def _named_arrays(tree: Any, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a tree with their column names; `name` is that of its root."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from _named_arrays(part, f"{name}/{key}")
    elif isinstance(tree, tuple):
        for index, part in enumerate(tree):
            yield from _named_arrays(part, f"{name}/{index}")
    else:
        yield name, tree
