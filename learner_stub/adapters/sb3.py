"""Algorithms of Stable-Baselines3, trained from an `EpisodeStream`.

    model = PPO("MlpPolicy", "CartPole-v1")
    with EpisodeStream.of(run_dir) as stream, WeightPublisher.of(run_dir) as weights:
        for steps in updates(model, stream, weights, total_timesteps=100_000):
            ...  # after each update

The model is the caller's: nothing here imports Stable-Baselines3. Its env gives it only spaces and its number of envs.
The workers act with the same policy, by `module.build = "headrace.workers.modules.sb3:build"`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.learner_stub.gae import advantages
from headrace.learner_stub.publisher import WeightPublisher
from headrace.learner_stub.rollout import chosen, map_nested
from headrace.learner_stub.stream import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ModuleError

_BUFFERS = ("RolloutBuffer", "DictRolloutBuffer")


def updates(model: Any, stream: EpisodeStream, weights: WeightPublisher, total_timesteps: int) -> Iterator[int]:
    """Train `model`, a PPO or A2C, and publish its weights; yield `model.num_timesteps` after each update.

    An update takes `n_steps` times `n_envs` steps or more: whole batches. It ends after `total_timesteps`, those of an
    earlier life of the model included, or when the stream does, after an update on the steps that are left.
    `model.ep_info_buffer` has returns and lengths of the newest episodes. What SB3 records goes to `weights.log`.

    Raises `ModuleError` for a model that does not fit, before anything is published, and the errors of `stream` and
    `weights`: a `WeightsMismatchError` where the workers' module is another one.
    """
    _check(model, stream)
    if not hasattr(model, "_logger"):  # else the user's own
        model.set_logger(_Figures())
    if model.ep_info_buffer is None:
        model.ep_info_buffer = deque(maxlen=model._stats_window_size)
    shape = model.rollout_buffer.buffer_size, model.rollout_buffer.n_envs
    weights.publish(model.policy.state_dict())
    try:
        gathered: list[ChunkBatch] = []
        for batch in chain(stream, [None]):
            if batch is not None:
                gathered.append(batch)
                _count(model, batch, total_timesteps)
            is_over = batch is None or model.num_timesteps >= total_timesteps
            if is_over or sum(part.steps for part in gathered) >= model.n_steps * model.n_envs:
                if fill(model, gathered):
                    model.train()
                    _tell(model, weights)
                    yield model.num_timesteps
                gathered = []
            if is_over:
                return
    finally:
        _reshape(model.rollout_buffer, *shape)  # as `model.learn` needs it


def fill(model: Any, batches: Sequence[ChunkBatch]) -> int:
    """Put the steps of `batches` into `model.rollout_buffer`, with their advantages; return how many.

    The buffer gets as many rows. Each holds what SB3's own `collect_rollouts` would: at a time limit the reward
    contains the value of the last observation. Where a chunk is cut, or its episode was aborted, only the advantage
    does. Such values are those of the model as it is now, the others those that the workers' policy gave.

    Random and logged actions are left out: they are no samples of a policy. Raises `ModuleError` for batches without
    `logp` or `values`.
    """
    own = [batch for batch in map(chosen, batches) if batch.steps]
    if not own:
        return 0
    for batch in own:
        if missing := {"logp", "values"} - batch.columns.keys():
            raise ModuleError(
                f"a batch of slot {batch.slot} has no column {min(missing)!r}, which SB3's rollout buffer needs; name "
                "headrace.workers.modules.sb3:build in module.build, and sample with explore = true"
            )
    parts = [batch.transitions() for batch in own]
    rewards, last, truncated = (_joined([getattr(p, name) for p in parts]) for name in ("rewards", "last", "truncated"))
    logp, values = (_joined([part.columns[name] for part in parts]) for name in ("logp", "values"))
    is_first = np.concatenate([b.table["t_start"][p.chunk] == 0 for b, p in zip(own, parts, strict=True)])
    after = _values(model, map_nested(lambda rows: rows[last], _joined([part.next_obs for part in parts])))
    after[_joined([part.terminated for part in parts])[last]] = 0.0
    rewards[last & truncated] += model.gamma * after[truncated[last]]
    after[truncated[last]] = 0.0
    offsets = np.append(0, np.flatnonzero(last) + 1)
    buffer = model.rollout_buffer
    _reshape(buffer, 1, len(rewards))
    buffer.add(
        _joined([part.obs for part in parts]),
        _joined([part.actions for part in parts]),
        rewards,
        np.roll(last, 1) & is_first,
        torch.from_numpy(values),
        torch.from_numpy(logp),
    )
    buffer.advantages[0] = advantages(
        rewards, values.astype(np.float64), after, offsets, gamma=model.gamma, gae_lambda=model.gae_lambda
    )
    buffer.returns = buffer.advantages + buffer.values
    return len(rewards)


class _Figures:
    """A logger for a model without one. It keeps what SB3 records since the last update."""

    def __init__(self) -> None:
        self.name_to_value: dict[str, Any] = {}

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        self.name_to_value[key] = value

    def dump(self, step: int = 0) -> None:
        self.name_to_value.clear()


def _check(model: Any, stream: EpisodeStream) -> None:
    buffer = getattr(model, "rollout_buffer", None)
    name = type(buffer).__name__
    if type(buffer).__module__ != "stable_baselines3.common.buffers" or name not in _BUFFERS:
        raise ModuleError(f"{type(model).__name__} has a {name}, and this adapter fills {' or '.join(_BUFFERS)} alone")
    if model.get_vec_normalize_env() is not None:
        raise ModuleError("the model's VecNormalize sees no step of the fleet; use the connector MeanStd in its place")
    stream.spaces().check_gymnasium(model.observation_space, model.action_space, f"this {type(model).__name__}")


def _count(model: Any, batch: ChunkBatch, total_timesteps: int) -> None:
    """Note the steps and the finished episodes of `batch` as SB3 does."""
    model.num_timesteps += batch.steps
    model._update_current_progress_remaining(min(model.num_timesteps, total_timesteps), total_timesteps)
    done = batch.table[np.isin(batch.table["end"], (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED))]
    told = zip(done["episode_return"].tolist(), done["episode_length"].tolist(), strict=True)
    model.ep_info_buffer.extend({"r": total, "l": length} for total, length in told)


def _tell(model: Any, weights: WeightPublisher) -> None:
    """Publish the weights, and log what SB3 recorded."""
    weights.publish(model.policy.state_dict())
    recorded = model.logger.name_to_value.items()
    weights.log({name: float(value) for name, value in recorded if isinstance(value, int | float | np.number)})
    model.logger.dump(model.num_timesteps)


def _reshape(buffer: Any, steps: int, envs: int) -> None:
    buffer.buffer_size, buffer.n_envs = steps, envs
    buffer.reset()


def _values(model: Any, obs: Any) -> NDArray[np.float64]:
    """Return the values (rows,) of `obs` by the model as it is."""
    model.policy.set_training_mode(False)
    with torch.no_grad():
        values: NDArray[Any] = model.policy.predict_values(model.policy.obs_to_tensor(obs)[0]).flatten().cpu().numpy()
    return values.astype(np.float64)


def _joined(parts: Sequence[Any]) -> Any:
    """Join arrays, or dicts of arrays, along their rows."""
    if isinstance(parts[0], dict):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)
