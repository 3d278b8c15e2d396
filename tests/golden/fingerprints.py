"""Short digests of everything that chunks carry, part by part, so that a difference says where it is.

Arrays count by dtype, shape and bytes; all else by its JSON with sorted keys. Only what a clock gave is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import orjson
import torch
import xxhash

from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.frames import wire

_JSON = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_COUNTERS = (
    "stepped",
    "open",
    "delivered",
    "delivered_chunks",
    "discarded",
    "env_steps",
    "env_steps_delivered",
    "env_steps_discarded",
    "episodes",
    "env_failures",
    "env_rebuilds",
)
_CLOCKS = ("timer", "time_between", "time_s", "throughput", "duration")


class Fingerprint:
    """Digests by part. What is added to a part twice is digested in that order."""

    def __init__(self) -> None:
        self._parts: dict[str, xxhash.xxh3_64] = defaultdict(xxhash.xxh3_64)

    def add(self, part: str, value: Any) -> None:
        """Digest `value` as part of `part`."""
        for piece in canonical(value):
            self._parts[part].update(piece)

    def digests(self) -> dict[str, str]:
        """Return each part's digest, by name."""
        return {part: self._parts[part].hexdigest()[:8] for part in sorted(self._parts)}


def canonical(value: Any) -> Iterator[bytes]:
    """Yield the bytes of a tree of arrays and plain values."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield f"{len(value)}{{".encode()
        for key in sorted(value, key=str):
            yield f"{key}:".encode()
            yield from canonical(value[key])
    elif isinstance(value, list | tuple):
        yield f"{len(value)}[".encode()
        for part in value:
            yield from canonical(part)
    else:
        yield orjson.dumps(value, option=_JSON)


def batches_of(samples: Sequence[EpisodeChunk]) -> list[ChunkBatch]:
    """Return the column batches below what one call sampled: one, or one for each module."""
    if isinstance(samples, ChunkBatch):
        return [samples]
    by_module: Mapping[str, ChunkBatch] = getattr(samples, "batches", {})
    return list(by_module.values())


def add_samples(fingerprint: Fingerprint, samples: Sequence[EpisodeChunk]) -> None:
    """Digest what one call sampled: its chunks in order, the batches below them, and their frames on the wire."""
    fingerprint.add("cuts", len(samples))
    for chunk in [samples[i] for i in finished_first(samples)] if isinstance(samples, ChunkBatch) else samples:
        _add_cut(fingerprint, chunk)
        add_steps(fingerprint, chunk)
        fingerprint.add("state_in", chunk.state_in)
        fingerprint.add("lookback", _lookback(chunk))
    for batch in batches_of(samples):
        _add_layout(fingerprint, batch)
        fingerprint.add("learnt", batch.connector_update)
        fingerprint.add("wire", [np.frombuffer(frame, np.uint8) for frame in _frames(batch)])


def finished_first(batch: ChunkBatch) -> list[int]:
    """Return the order of chunks by which those of finished episodes come first."""
    done = np.isin(batch.table["end"], (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED))
    order: list[int] = np.argsort(~done, kind="stable").tolist()
    return order


def _add_cut(fingerprint: Fingerprint, chunk: EpisodeChunk) -> None:
    cut = chunk.episode_id, chunk.chunk_index, chunk.t_start, len(chunk), chunk.end, chunk.end_reason
    fingerprint.add("cuts", [*cut, chunk.agent_id, chunk.module_id, chunk.env_index])
    fingerprint.add("header", _header(chunk))


def _header(chunk: EpisodeChunk) -> list[Any]:
    who = chunk.slot, chunk.incarnation, chunk.seed, chunk.explore, chunk.random_actions
    return [*who, chunk.learner_epoch, chunk.weights_digest, chunk.episode_return, chunk.episode_length]


def add_steps(fingerprint: Fingerprint, chunk: EpisodeChunk) -> None:
    """Digest the steps of a chunk, or of an episode."""
    sent = {name: column for name, column in chunk.columns.items() if name.startswith("actions_for_env")}
    fingerprint.add("obs", chunk.obs)
    fingerprint.add("actions", chunk.actions)
    fingerprint.add("actions_for_env", sent)
    fingerprint.add("rewards", chunk.rewards)
    fingerprint.add("weights_seq", chunk.weights_seq)
    fingerprint.add("env_t", chunk.env_t)
    fingerprint.add("columns", {name: column for name, column in chunk.columns.items() if name not in sent})
    fingerprint.add("infos", chunk.infos)


def _lookback(chunk: EpisodeChunk) -> Any:
    rows = chunk.lookback
    if rows is None:
        return None
    return [rows.obs, rows.actions, rows.rewards, rows.weights_seq, rows.env_t, rows.columns]


def _add_layout(fingerprint: Fingerprint, batch: ChunkBatch) -> None:
    order = finished_first(batch)
    names = list(batch.agents), list(batch.modules), list(batch.reasons)
    spaces = batch.observation_space.model_dump(mode="json"), batch.action_space.model_dump(mode="json")
    columns = [(name, column.dtype.str, list(column.shape)) for name, column in batch.arrays.items()]
    fingerprint.add("layout", [order, *names, *spaces, columns])
    fingerprint.add("layout", [batch.offsets, batch.obs_offsets, batch.state_offsets, batch.lookback_offsets])
    fingerprint.add("layout", [batch.slot, batch.incarnation, batch.seq, batch.learner_epoch, batch.weights_digest])


def _frames(batch: ChunkBatch) -> list[Any]:
    header = BatchHeader(
        fleet_id="golden",
        slot=batch.slot,
        incarnation=batch.incarnation,
        seq=batch.seq,
        steps=batch.steps,
        chunks=len(batch),
        learner_epoch=batch.learner_epoch,
        weights_digest=batch.weights_digest,
        agents=list(batch.agents),
        modules=list(batch.modules),
        reasons=list(batch.reasons),
        totals=WorkerTotals(),
    )
    with mock.patch.object(wire, "PROTOCOL_MINOR", 0):  # a new minor version changes no chunk
        return encode_batch(batch, header)


def add_lives(fingerprint: Fingerprint, chunks: Iterable[EpisodeChunk], episodes: int) -> None:
    """Digest the first `episodes` that each agent of each env finished, wherever chunks of them were cut.

    For envs that are stepped each in its own time, where cuts depend on the clock.
    """
    for parts in finished(chunks, episodes):
        whole = to_episode(parts)
        cut = whole.episode_id, len(whole), whole.end, whole.end_reason, whole.agent_id, whole.module_id
        fingerprint.add("cuts", [*cut, whole.env_index])
        fingerprint.add("header", _header(whole))
        add_steps(fingerprint, whole)
        fingerprint.add("state_in", whole.state_in)


def finished(chunks: Iterable[EpisodeChunk], episodes: int) -> list[list[EpisodeChunk]]:
    """Return the chunks of the first `episodes` finished in each env, by agent, in the order of their ids."""
    lives: dict[tuple[int, str], dict[str, list[EpisodeChunk]]] = defaultdict(lambda: defaultdict(list))
    for chunk in chunks:
        lives[chunk.env_index, chunk.episode_id][chunk.agent_id].append(chunk)
    found: list[list[EpisodeChunk]] = []
    counts: dict[int, int] = defaultdict(int)
    for env_index, episode_id in sorted(lives):
        agents = lives[env_index, episode_id]
        if counts[env_index] < episodes and all(parts[-1].is_done for parts in agents.values()):
            counts[env_index] += 1
            found += [agents[agent] for agent in sorted(agents)]
    return found


def counters(totals: Any) -> dict[str, Any]:
    """Return a runner's totals, without its clocks."""
    return {name: getattr(totals, name) for name in _COUNTERS}


def without_clocks(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a runner's report without what a clock gave."""
    kept = {name: value for name, value in report.items() if not _is_clock(name)}
    kept["windows"] = [window for window in report["windows"] if not _is_clock(window["path"][0])]
    return kept


def _is_clock(name: str) -> bool:
    return any(word in name for word in _CLOCKS)
