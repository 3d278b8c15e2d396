"""Cuts a fragment into a batch: the rows of each chunk, the steps before it, and the table that describes chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import STATE_IN, ChunkBatch, is_obs_column
from headrace.schemas.chunks.chunk import CHUNK_TABLE, LOOKBACK, ChunkEnd
from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.chunks.task import stamps
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.sampling.fragment import Fragment, OpenChunk

Columns = Mapping[str, NDArray[Any]]
REASONS = ("", *(reason.value for reason in Discard if reason is not Discard.FROZEN))  # which ends no episode


@dataclass(frozen=True, slots=True)
class Marker:
    """An end marker: a part of this episode was delivered, and the episode will never finish."""

    episode: Episode
    reason: Discard


@dataclass(frozen=True, slots=True)
class Stamp:
    """The values that all chunks of a batch share."""

    id_high: int
    flags: int
    slot: int
    incarnation: int
    learner_epoch: int
    digest_of: Callable[[NDArray[np.int64]], str]
    """Returns the digest of the newest of the weights' versions in a batch."""
    lookback_horizon: int = 0


def keep_back(
    fragment: Fragment,
    chunks: Sequence[OpenChunk],
    totals: RunnerTotals,
    lanes: Sequence[Lane],
    *,
    env_steps: int | None = None,
) -> list[OpenChunk]:
    """Return the chunks to deliver, and count the steps of chunks excluded from training.

    `env_steps` None: each of these steps was an env step.
    """
    delivered = []
    for chunk in chunks:
        episode, steps = chunk.episode, chunk.stop - chunk.start
        if episode.trains:
            delivered.append(chunk)
            continue
        episode.steps += steps
        episode.episode_return += float(fragment.columns["rewards"][chunk.lane, chunk.start : chunk.stop].sum())
        totals.open -= steps
        totals.discard(Discard.TRAINING_DISABLED, steps, env_steps)
        lanes[episode.env_index].budget.delivered()
    return delivered


def count_cut(batch: ChunkBatch, chunks: Sequence[OpenChunk], totals: RunnerTotals, lanes: Sequence[Lane]) -> None:
    """Count the `chunks` of `batch` as delivered. Keep the info at each seam, which the next chunk gets too."""
    totals.open -= batch.steps
    totals.delivered += batch.steps
    totals.delivered_chunks += len(batch)
    for chunk in chunks:
        lanes[chunk.episode.env_index].budget.delivered()
        chunk.episode.seam_info = chunk.infos.get(chunk.stop - chunk.start)


def cut(
    fragment: Fragment, chunks: Sequence[OpenChunk], markers: Sequence[Marker], spaces: Spaces, stamp: Stamp
) -> ChunkBatch:
    """Return the batch of `chunks` and end `markers`. The batch owns the fragment's buffers from now on.

    Chunks stand by lane and time, markers last.
    Updates each episode with how much of it was delivered.
    """
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = np.array([chunk.stop for chunk in chunks], np.int64) - starts
    if fragment.is_rectangle(chunks):
        columns = {name: column.reshape(-1, *column.shape[2:]) for name, column in fragment.columns.items()}
    else:
        columns = _take(fragment, chunks, starts, lengths)
    columns = fragment.complete(columns)
    for name, leaf in leaves(spaces.action, "actions"):
        # A fragment adds its action columns at the first step. A fragment with end markers only may never have had a
        # step.
        columns.setdefault(name, np.empty((0, *leaf_shape(leaf)), column_dtype(leaf)))
    looks_back: list[int] = []
    if stamp.lookback_horizon:
        looks_back, lookback = look_back(columns, chunks, lengths, stamp.lookback_horizon)
        columns |= lookback
    for name in chunks[0].state_in if chunks else ():
        columns[STATE_IN + name] = np.stack([chunk.state_in[name] for chunk in chunks])
    table = np.zeros(len(chunks) + len(markers), CHUNK_TABLE)
    returns = _sums(columns["rewards"], lengths)
    _fill_chunks(table[: len(chunks)], chunks, lengths, returns)
    _fill_markers(table[len(chunks) :], markers)
    table["id_high"], table["flags"] = stamp.id_high, stamp.flags
    table["lookback"][: len(looks_back)] = looks_back
    tasks, task_of = stamps([chunk.episode.task for chunk in chunks] + [marker.episode.task for marker in markers])
    return ChunkBatch(
        table=table,
        arrays=columns,
        observation_space=spaces.observation,
        action_space=spaces.action,
        reasons=REASONS,
        infos={i: chunk.infos for i, chunk in enumerate(chunks) if chunk.infos},
        slot=stamp.slot,
        incarnation=stamp.incarnation,
        learner_epoch=stamp.learner_epoch,
        weights_digest=stamp.digest_of(columns["weights_seq"]),
        tasks=tasks,
        task_of=task_of,
    )


def _take(
    fragment: Fragment, chunks: Sequence[OpenChunk], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    lanes = np.array([chunk.lane for chunk in chunks], np.int64)
    step_rows = _ranges(lanes * fragment.capacity + starts, lengths)
    obs_rows = _ranges(lanes * (fragment.capacity + 1) + starts, lengths + 1)
    last = np.cumsum(lengths + 1) - 1
    final = np.array([chunk.final for chunk in chunks], np.int64)
    closed = final >= 0
    columns = {}
    for name, column in fragment.columns.items():
        rows = obs_rows if is_obs_column(name) else step_rows
        columns[name] = np.take(column.reshape(-1, *column.shape[2:]), rows, axis=0)
        if is_obs_column(name) and closed.any():
            columns[name][last[closed]] = np.concatenate(fragment.finals[name])[final[closed]]
    return columns


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [s, s + 1, ... s + n - 1] for each (s, n), one after another."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


def _sums(rewards: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each chunk's sum of rewards. No chunk is empty; `reduceat` would be wrong for one."""
    if not len(lengths):
        return np.empty(0)
    return np.add.reduceat(rewards, np.cumsum(lengths) - lengths)


def _fill_chunks(
    table: NDArray[np.void], chunks: Sequence[OpenChunk], lengths: NDArray[np.int64], returns: NDArray[np.float64]
) -> None:
    episodes = [chunk.episode for chunk in chunks]
    _fill_episodes(table, episodes)
    table["length"] = lengths
    table["end"] = [chunk.end for chunk in chunks]
    table["episode_length"] += lengths
    table["episode_return"] += returns
    totals = zip(table["episode_length"].tolist(), table["episode_return"].tolist(), strict=True)
    for episode, (steps, episode_return) in zip(episodes, totals, strict=True):
        episode.chunks += 1
        episode.steps, episode.episode_return = steps, episode_return


def _fill_markers(table: NDArray[np.void], markers: Sequence[Marker]) -> None:
    _fill_episodes(table, [marker.episode for marker in markers])
    table["end"] = ChunkEnd.ABORTED
    table["reason"] = [REASONS.index(marker.reason.value) for marker in markers]


def _fill_episodes(table: NDArray[np.void], episodes: Sequence[Episode]) -> None:
    """Fill in ids, and the counts of each episode before this delivery."""
    table["id_low"] = [episode.id_low for episode in episodes]
    table["seed"] = [episode.seed for episode in episodes]
    table["env_index"] = [episode.env_index for episode in episodes]
    table["chunk_index"] = [episode.chunks for episode in episodes]
    table["t_start"] = table["episode_length"] = [episode.steps for episode in episodes]
    table["episode_return"] = [episode.episode_return for episode in episodes]


def look_back(
    columns: Columns, chunks: Sequence[OpenChunk], lengths: NDArray[np.int64], horizon: int
) -> tuple[list[int], dict[str, NDArray[Any]]]:
    """Return how many steps each chunk looks back, and the lookback columns for all of them.

    `columns` are the step and observation columns of exactly these chunks, one after another. Episodes that continue
    keep copies of their last `horizon` steps for the next cut. A chunk has no lookback if its columns differ from those
    of the steps before. For example, random actions have no "logp".
    """
    kept: list[Columns] = []
    start = 0
    for i, (chunk, length) in enumerate(zip(chunks, lengths.tolist(), strict=True)):
        episode, before = chunk.episode, chunk.episode.last_steps
        own = {name: _steps(name, column, start, length, i) for name, column in columns.items()}
        kept.append(before if _alike(before, own) else {})
        episode.last_steps = _last(kept[-1], own, horizon) if chunk.end is ChunkEnd.ONGOING else {}
        start += length
    counts = [len(rows["rewards"]) if rows else 0 for rows in kept]
    return counts, {
        LOOKBACK + name: np.concatenate([column[:0], *(rows[name] for rows in kept if rows)])
        for name, column in columns.items()
    }


def _steps(name: str, column: NDArray[Any], start: int, length: int, chunks_before: int) -> NDArray[Any]:
    """Return a chunk's rows of a column, without the observation after its last step."""
    first = start + chunks_before if is_obs_column(name) else start
    return column[first : first + length]


def _alike(before: Columns, own: Columns) -> bool:
    return before.keys() == own.keys() and all(
        (rows.dtype, rows.shape[1:]) == (own[name].dtype, own[name].shape[1:]) for name, rows in before.items()
    )


def _last(before: Columns, own: Columns, horizon: int) -> Columns:
    """Return copies of the last `horizon` steps. Views would keep a whole fragment in memory."""
    return {
        name: np.concatenate([before[name], rows[-horizon:]])[-horizon:] if before else rows[-horizon:].copy()
        for name, rows in own.items()
    }
