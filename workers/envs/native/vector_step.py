"""Reading a step of a native vector, all lanes at once. Each reader returns arrays or raises `EnvContractError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.bounds import reward_due, unsound_rewards, whole_array
from headrace.workers.envs.checks import check_info
from headrace.workers.envs.native.infos import as_numpy, has_rows, in_order_of, moved


@dataclass(slots=True, eq=False)
class VectorStep:
    """rewards: float64 (width,). terminated and truncated: bool (width,). observations: nested arrays (width, ...)."""

    observations: Any
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Mapping[Any, Any]
    lanes: NDArray[np.intp] | None = None
    """The lane of each row of the observations; None: all lanes in order. The other rows are in the order of lanes."""

    def end_of(self, lane: int) -> ChunkEnd:
        """Return how the episode in `lane`, which is done, has ended; see `checks.end_of`."""
        return ChunkEnd.TERMINATED if self.terminated[lane] else ChunkEnd.TRUNCATED


def read_step(answer: Any, width: int) -> VectorStep:
    """Read the result of `step`. Rewards are not checked yet: lanes that were reset may have any."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise EnvContractError("answer of step", f"{answer!r:.120}", "(obs, rewards, terminateds, truncateds, infos)")
    if answer[4] or {*map(type, answer[:4])} != {np.ndarray}:
        answer = as_numpy(answer)
    observations, rewards, terminated, truncated, infos = answer
    check_info(infos)
    rewards = _array("Rewards", rewards)
    if rewards.shape != (width,) or rewards.dtype.kind not in "fiub":
        raise EnvContractError("Rewards", f"{rewards.dtype} {rewards.shape}", f"{width} real scalars")
    return VectorStep(
        observations,
        rewards.astype(np.float64, copy=False),
        _flags("terminated", terminated, width),
        _flags("truncated", truncated, width),
        infos,
    )


def in_lane_order(step: VectorStep) -> VectorStep:
    """Return a step whose rows are in the order of lanes, where "env_id" names another one."""
    lanes = moved(step.infos, len(step.rewards))
    if lanes is None:
        return step
    rows = np.argsort(lanes).tolist()
    flags = step.terminated[rows], step.truncated[rows]
    return VectorStep(step.observations, step.rewards[rows], *flags, in_order_of(rows, step.infos), lanes)


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        return whole_array(values)
    except ValueError as error:
        raise EnvContractError(name, brief(error), "a number for each env") from error


def _flags(name: str, values: Any, width: int) -> NDArray[np.bool_]:
    flags = _array(name, values)
    if flags.shape != (width,) or flags.dtype != np.bool_:
        raise EnvContractError(name, f"{flags.dtype} {flags.shape}", f"bool {(width,)}")
    return flags


def bad_rewards(step: VectorStep, live: NDArray[np.intp] | None, actions: Any) -> dict[int, EnvContractError]:
    """Return the errors, by lane, of rewards of lanes that stepped, and set these to 0. `actions` may be None."""
    lanes = unsound_rewards(step.rewards)
    bad: dict[int, EnvContractError] = {}
    if not len(lanes):
        return bad
    for lane in lanes.tolist():
        if live is None or lane in live:
            did = f". Actions={_row(actions, lane)!r:.200}" if actions is not None else ""
            seen = f"{step.rewards[lane]} ({step.rewards.dtype}){did}"
            bad[lane] = EnvContractError("Reward", seen, reward_due(step.rewards[lane]))
    step.rewards = step.rewards.copy()  # the array may belong to the vector
    step.rewards[lanes] = 0.0
    return bad


def final_observations(infos: Mapping[str, Any], lanes: Sequence[int], width: int) -> list[Any]:
    """Return the last observations of `lanes`, which the vector has reset in the step that ended their episodes."""
    finals = infos.get("final_obs")
    if finals is None:
        raise EnvContractError("infos", f"{list(infos)!r:.120}", "with 'final_obs', for episodes have ended")
    mask = infos.get("_final_obs", [True] * width)
    if not _is_whole(finals, width) or not has_rows(mask, width) or not all(mask[lane] for lane in lanes):
        seen = f"{brief(finals)} with the mask {brief(mask)}"
        raise EnvContractError("infos['final_obs']", seen, f"a row for each of {width} envs, with those of {lanes}")
    return [_row(finals, lane) for lane in lanes]


def _is_whole(batch: Any, width: int) -> bool:
    """Return whether `_row` finds a row of each env in `batch`."""
    if isinstance(batch, Mapping):
        return all(_is_whole(part, width) for key, part in batch.items() if not key.startswith("_"))
    return all(_is_whole(part, width) for part in batch) if isinstance(batch, tuple) else has_rows(batch, width)


def _row(batch: Any, lane: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _row(part, lane) for key, part in batch.items() if not key.startswith("_")}
    return tuple(_row(part, lane) for part in batch) if isinstance(batch, tuple) else batch[lane]
