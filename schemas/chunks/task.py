"""Tasks of episodes: what a task may hold, rules that give each env its own value, and the task that a chunk names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Strict

from headrace.schemas.basics.bounds import MOST_TASK_NAME, Natural, Version
from headrace.schemas.basics.printable import brief
from headrace.schemas.errors import EncodeError

if TYPE_CHECKING:
    from headrace.schemas.chunks.chunk import EpisodeChunk

MOST_TASK_BYTES = 4096
"""Most bytes of one task as JSON."""
MOST_DEPTH = 8
_MOST_SPREAD = 1e300  # their difference is finite

SPREAD = "spread"
"""The key of a rule in the place of a value; see `spread`."""

Over = Literal["fleet", "workers", "envs"]
Scale = Literal["linear", "log"]
TaskJson = Annotated[tuple[Version, dict[str, Any], Natural | None, Natural], Strict(False)]
"""The result of `Task.as_json`; `Task(*result)` makes the task from it."""
GroupId = tuple[tuple[int, int], int]
"""(version, number of the group in it)."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one episode, in force since the reset that began it."""

    version: tuple[int, int]
    """(epoch, seq) of the publication that it comes from."""
    values: Mapping[str, Any]
    """The values that the env got: rules are replaced by this env's values."""
    group: int | None = None
    """Number of the group of episodes that begin with the same seed and task; None without groups."""
    member: int = 0
    """Its place in the group, from 0 on."""
    published: str = field(default="", compare=False, repr=False)
    """The `task_name` of what was published, rules included, for figures; "" at a learner."""

    def as_json(self) -> list[Any]:
        """Return the task as it stands in the header of a batch."""
        return [list(self.version), dict(self.values), self.group, self.member]


def task_name(values: Mapping[str, Any]) -> str:
    """Return a task's name: its values as JSON with sorted keys. A long one is cut, and has a digest at its end."""
    name = orjson.dumps(values, default=str, option=orjson.OPT_SORT_KEYS).decode()
    if len(name) <= MOST_TASK_NAME:
        return name
    return f"{name[: MOST_TASK_NAME - 12]}... {hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def stamps(tasks: Sequence[Task | None]) -> tuple[tuple[Task, ...], NDArray[np.int32] | None]:
    """Return the distinct tasks, and each item's index in them + 1, or 0 for None. No array if no item has a task."""
    if not any(tasks):
        return (), None
    keys = [b"" if task is None else orjson.dumps(task.as_json()) for task in tasks]
    distinct = {key: task for key, task in zip(keys, tasks, strict=True) if task is not None}
    numbers = {key: number for number, key in enumerate(distinct, start=1)}
    return tuple(distinct.values()), np.array([numbers.get(key, 0) for key in keys], np.int32)


def groups_of(
    given: Iterable[EpisodeChunk | Iterable[EpisodeChunk]], size: int
) -> tuple[dict[GroupId, list[list[EpisodeChunk]]], dict[GroupId, list[int]]]:
    """Return the complete groups of `size` episodes in these chunks or batches, and what the other groups lack.

    A complete group has the chunks of each member, by member. An incomplete one has the numbers of the missing members,
    whose episodes are not over, were aborted, or failed at their reset. Of a member that has come twice, as from a
    worker that was restarted, the first episode counts.
    """
    groups: dict[GroupId, dict[int, dict[str, list[EpisodeChunk]]]] = {}
    for item in given:
        for chunk in item if isinstance(item, Iterable) else (item,):
            if chunk.task is not None and chunk.task.group is not None:
                members = groups.setdefault((chunk.task.version, chunk.task.group), {})
                members.setdefault(chunk.task.member, {}).setdefault(chunk.episode_id, []).append(chunk)
    complete: dict[GroupId, list[list[EpisodeChunk]]] = {}
    missing: dict[GroupId, list[int]] = {}
    for group, members in groups.items():
        over = {m: [own for own in ids.values() if any(chunk.is_done for chunk in own)] for m, ids in members.items()}
        if lacking := [member for member in range(size) if not over.get(member)]:
            missing[group] = lacking
        else:
            complete[group] = [over[member][0] for member in range(size)]
    return complete, missing


class Place(NamedTuple):
    """The place of an env in its fleet: env `env` of `num_envs` in worker `worker` of `num_workers`."""

    worker: int
    num_workers: int
    env: int
    num_envs: int


def spread(first: float, last: float, *, over: Over = "fleet", scale: Scale = "linear") -> dict[str, Any]:
    """Return a rule that stands in a task for a number which differs from env to env.

    The numbers go from `first` to `last` in equal steps, or in equal ratios with scale "log". `over` says what they
    are counted over: all envs of the fleet, the workers, or the envs of each worker. `spread(0.4, 0.4**8, scale="log")`
    gives env i of n the epsilon 0.4 ** (1 + 7 * i / (n - 1)) of Ape-X (https://arxiv.org/abs/1803.00933).

    Raises `EncodeError` for numbers beyond 1e300, and for a "log" scale unless both are positive.
    """
    ends = (first, last)
    if not all(isinstance(end, int | float) and abs(end) <= _MOST_SPREAD for end in ends):
        raise EncodeError(f"spread({brief(first)}, {brief(last)}): give two numbers of at most {_MOST_SPREAD:g}")
    if scale == "log" and min(ends) <= 0:
        raise EncodeError(f"spread({first!r}, {last!r}, scale='log'): both must be above 0")
    if over not in ("fleet", "workers", "envs") or scale not in ("linear", "log"):
        raise EncodeError(
            f"spread(over={over!r}, scale={scale!r}): over is fleet, workers or envs; scale linear or log"
        )
    return {SPREAD: [float(first), float(last), over, scale]}


def values_at(values: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the values that the env at `place` gets: rules become numbers."""
    return {n: _spread_at(v[SPREAD], place) if isinstance(v, dict) else v for n, v in values.items()}


def _spread_at(rule: list[Any], place: Place) -> float:
    first, last, over, scale = rule
    index, count = {
        "fleet": (place.worker * place.num_envs + place.env, place.num_workers * place.num_envs),
        "workers": (place.worker, place.num_workers),
        "envs": (place.env, place.num_envs),
    }[over]
    at = min(index / (count - 1), 1.0) if count > 1 else 0.0  # a worker beyond the fleet's number gets the last value
    if scale == "log":
        return float(first ** (1 - at) * last**at)
    return float(first + (last - first) * at)


def check_values(values: Any) -> dict[str, Any]:
    """Return a task's values as JSON has them. Raises `EncodeError` for a task that cannot be published.

    A task is a mapping of names to numbers, text, bools, None, lists of these, or rules of `spread`.
    """
    if not isinstance(values, Mapping):
        raise EncodeError(f'a task is a mapping such as {{"level": 3}}, not {brief(values, 100)}')
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable():
            raise EncodeError(f"a task's name {brief(name)} is no printable text")
        if isinstance(value, Mapping):
            _check_rule(name, value)
        elif (odd := _beyond_json(value)) is not None:
            raise EncodeError(
                f"task value {name!r:.80}: {brief(odd)} is no finite number, text, bool, None or list of these, "
                f"at most {MOST_DEPTH} deep"
            )
    try:
        written = orjson.dumps(dict(values), default=lambda value: value.item(), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise EncodeError(f"a task cannot be written as JSON: {error}") from error
    if len(written) > MOST_TASK_BYTES:
        raise EncodeError(
            f"a task of {len(written):,} bytes as JSON; at most {MOST_TASK_BYTES:,} may be published: give the env a "
            "name or a seed from which it makes the rest"
        )
    read: dict[str, Any] = orjson.loads(written)
    return read


def _check_rule(name: str, value: Mapping[Any, Any]) -> None:
    try:
        (first, last, over, scale) = value[SPREAD]
        if len(value) != 1:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise EncodeError(
            f"task value {name!r:.80} is a mapping; only what `spread(first, last)` returns may be one"
        ) from error
    spread(first, last, over=over, scale=scale)


def _beyond_json(value: Any, depth: int = 0) -> Any:
    """Return the first part of a value that a task may not hold; None if there is none."""
    if isinstance(value, list | tuple):
        inner = (_beyond_json(item, depth + 1) for item in value)
        return value if depth == MOST_DEPTH else next((odd for odd in inner if odd is not None), None)
    if value is None or isinstance(value, bool | str):
        return None
    if isinstance(value, int):
        return None if -(2**53) <= value <= 2**53 else value
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if isinstance(number, bool | int):
        return None
    return None if isinstance(number, float) and math.isfinite(number) else value
