"""How tests compare chunks, states and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import orjson

from headrace.learner_stub.checkpoints.state_tree import pack, unpack
from headrace.schemas.chunks.chunk import EpisodeChunk


def assert_same(a: Any, b: Any) -> None:
    assert (a.episode_id, a.chunk_index, a.t_start, a.end, a.seed) == (
        b.episode_id,
        b.chunk_index,
        b.t_start,
        b.end,
        b.seed,
    )
    assert a.obs.tobytes() == b.obs.tobytes()
    assert a.actions.tobytes() == b.actions.tobytes()
    assert a.rewards.tobytes() == b.rewards.tobytes()
    for name in ("logp", "values", "action_dist_inputs"):
        assert a.columns[name].tobytes() == b.columns[name].tobytes()


def contents(chunks: Iterable[EpisodeChunk]) -> list[Any]:
    """What is to be alike in two runners, of chunks in any order."""
    return sorted(map(_content, chunks))


def _content(c: EpisodeChunk) -> Any:
    drawn = c.columns["logp"].tobytes() if len(c) and "logp" in c.columns else b""
    arrays = [part.tobytes() for part in (*_leaves(c.obs), *_leaves(c.actions), c.rewards)]
    return c.episode_id, c.agent_id, c.module_id, c.chunk_index, c.seed, arrays, drawn


def _leaves(value: Any) -> Iterator[Any]:
    """The arrays of a dict, a tuple, or one alone."""
    if isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def changed(weights: Any, change: Callable[[Any], Any]) -> Any:
    """`weights`, of one module or by module id, with each array changed."""
    if isinstance(weights, dict):
        return {name: changed(own, change) for name, own in weights.items()}
    return change(weights)


def through_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """`state` as a learner's file brings it back."""
    tree, arrays = pack(state, "")
    found: dict[str, Any] = unpack(orjson.loads(orjson.dumps(tree)), arrays)
    return found


def numbers_in(report: Any) -> list[float]:
    if isinstance(report, dict):
        return [n for value in report.values() for n in numbers_in(value)]
    return [n for value in report for n in numbers_in(value)] if isinstance(report, list) else [report]
