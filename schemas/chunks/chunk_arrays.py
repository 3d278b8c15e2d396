"""Operations on the nested arrays of chunks: mapping, joining, and checks where one chunk follows another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import ChunkError

if TYPE_CHECKING:
    from headrace.schemas.chunks.chunk import EpisodeChunk


def map_arrays(change: Callable[..., Any], *trees: Any) -> Any:
    """Apply `change` to the arrays at the same place of all `trees` (dicts, tuples, arrays); return the results."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: map_arrays(change, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(map_arrays(change, *parts) for parts in zip(*trees, strict=True))
    return change(*trees)


def join_columns(parts: Sequence[Any]) -> Any:
    """Join step columns (T, ...) one after another, keeping their nesting."""
    return map_arrays(lambda *arrays: np.concatenate(arrays), *parts)


def join_shared(parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Join the step columns that all parts have."""
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: np.concatenate([part[name] for part in parts]) for name in shared}


def join_observations(parts: Sequence[Any]) -> Any:
    """Join observation columns (T+1, ...); the last observation of each part is the first of the next."""
    heads = [map_arrays(lambda array: array[:-1], part) for part in parts[:-1]]
    return join_columns([*heads, parts[-1]])


def join_infos(chunks: Sequence[EpisodeChunk]) -> list[dict[str, Any]]:
    """Join the infos of T+1 observations each; return an empty list when no chunk has any."""
    if not any(chunk.infos for chunk in chunks):
        return []
    joined: list[dict[str, Any]] = [{}]
    for chunk in chunks:
        infos = chunk.infos or [{}] * (len(chunk) + 1)
        joined[-1] = joined[-1] or infos[0]
        joined += infos[1:]
    return joined


def check_adjacent(before: EpisodeChunk, after: EpisodeChunk, *, ongoing: bool) -> None:
    """Raise `ChunkError` unless `after` goes on where `before`, which is `ongoing`, was cut."""
    for name in ("episode_id", "agent_id", "module_id"):
        ours, theirs = getattr(before, name), getattr(after, name)
        if ours != theirs:
            raise ChunkError(f"{before!r} and {after!r} differ in {name}: {ours!r} and {theirs!r}")
    if not ongoing:
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
    last, first = dict(named_arrays(before.obs, "obs")), dict(named_arrays(after.obs, "obs"))
    for name, column in last.items():
        newest, oldest = column[-1], first[name][0]
        if not np.array_equal(newest, oldest, equal_nan=column.dtype.kind == "f"):
            raise ChunkError(
                f"{before!r} and {after!r} share an observation, and {name!r} is not the same in it: "
                f"{newest!r:.80} and {oldest!r:.80}"
            )


def _check_alike(what: str, ours: Any, theirs: Any, before: EpisodeChunk, after: EpisodeChunk) -> None:
    mine = {name: (array.dtype.str, array.shape[1:]) for name, array in named_arrays(ours, what)}
    other = {name: (array.dtype.str, array.shape[1:]) for name, array in named_arrays(theirs, what)}
    for name in sorted(mine.keys() | other.keys()):
        if mine.get(name) != other.get(name):
            raise ChunkError(
                f"{before!r} and {after!r} differ in {name!r}: {mine.get(name, 'absent')} and "
                f"{other.get(name, 'absent')} (dtype, shape of a row)"
            )


def named_arrays(tree: Any, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a tree with their column names; `name` is that of its root."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from named_arrays(part, f"{name}/{key}")
    elif isinstance(tree, tuple):
        for index, part in enumerate(tree):
            yield from named_arrays(part, f"{name}/{index}")
    else:
        yield name, tree
