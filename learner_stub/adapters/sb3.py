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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.learner_stub.checkpoints.learner_state import save_policy
from headrace.learner_stub.publishing.publisher import WeightPublisher
from headrace.learner_stub.rollouts.connector_merger import ConnectorMerger
from headrace.learner_stub.rollouts.returns import gae
from headrace.learner_stub.rollouts.rollout import chosen
from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.learner_stub.streaming.stream import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.batch_views import Transitions
from headrace.schemas.chunks.chunk import ChunkEnd, map_arrays
from headrace.schemas.chunks.episodes import episodes_of
from headrace.schemas.errors import ConfigError, ModuleError

_BUFFERS = ("RolloutBuffer", "DictRolloutBuffer", "ReplayBuffer", "DictReplayBuffer")
_COMPARED = 64
"""Most steps of a batch whose values are compared with the model's."""


def updates(
    model: Any,
    stream: EpisodeStream,
    weights: WeightPublisher,
    total_timesteps: int,
    merger: ConnectorMerger | None = None,
) -> Iterator[int]:
    """Train `model` and publish its weights; yield `model.num_timesteps` after each update.

    - PPO, A2C: an update takes `n_steps` times `n_envs` steps or more, as whole batches. When the stream or
      `total_timesteps` ends, a last one takes the steps that are left.
    - DQN, SAC: an update is one batch. Its steps go into the replay buffer as SB3's would: after each `train_freq`
      steps follow the gradient steps that `gradient_steps` and `learning_starts` ask for; where `train_freq` counts
      episodes, after the whole batch. Workers explore with DQN's exploration rate; SAC's actor explores from the start.

    It ends after `total_timesteps`, those of an earlier life of the model included, or when the stream does. A model
    that has had them is published, and trains no more.
    `model.ep_info_buffer` has returns and lengths of the newest episodes. What SB3 records goes to `weights.log`.
    `merger` merges what the workers' connectors learn, such as `MeanStd`; its state is published with the weights.

    Raises `ConfigError` for a `total_timesteps` below 1, and `ModuleError` for a model that does not fit, both before
    anything is published; `ModuleError` before it trains PPO or A2C whose values are not those that workers give;
    `ConnectorError` where workers have connectors that learn and `merger` has not; and the errors of `stream` and
    `weights`: a `WeightsMismatchError` where the workers' module is another one.
    """
    if total_timesteps < 1:
        raise ConfigError(f"{total_timesteps} is no number of steps to train on; give 1 or more", key="total_timesteps")
    _check(model, stream)
    if not hasattr(model, "_logger"):  # else the user's own
        model.set_logger(_Figures())
    if model.ep_info_buffer is None:  # SB3 makes both or none
        model.ep_info_buffer, model.ep_success_buffer = (deque(maxlen=model._stats_window_size) for _ in range(2))
    model._update_current_progress_remaining(min(model.num_timesteps, total_timesteps), total_timesteps)
    if hasattr(model, "exploration_schedule"):
        model.exploration_rate = model.exploration_schedule(model._current_progress_remaining)
    merger = merger or ConnectorMerger()
    first = weights.publish(_acting(model, merger))
    if model.num_timesteps >= total_timesteps:
        return
    if hasattr(model, "rollout_buffer"):
        yield from _on_policy(model, stream, weights, total_timesteps, merger, first)
    else:
        yield from _off_policy(model, stream, weights, total_timesteps, merger)


def _on_policy(
    model: Any,
    stream: EpisodeStream,
    weights: WeightPublisher,
    total_timesteps: int,
    merger: ConnectorMerger,
    first: int,
) -> Iterator[int]:
    is_trained = False
    shape = model.rollout_buffer.buffer_size, model.rollout_buffer.n_envs
    try:
        gathered: list[ChunkBatch] = []
        for batch in chain(stream, [None]):
            if batch is not None:
                gathered.append(batch)
                merger.take(batch)
                _count(model, batch, total_timesteps)
            is_over = batch is None or model.num_timesteps >= total_timesteps
            if is_over or sum(part.steps for part in gathered) >= model.n_steps * model.n_envs:
                if fill(model, gathered):
                    if not is_trained:  # the model still is as it was published
                        _check_values(model, gathered, weights, first)
                    model.train()
                    is_trained = True
                    _tell(model, weights, merger)
                    yield model.num_timesteps
                gathered = []
            if is_over:
                return
    finally:
        _reshape(model.rollout_buffer, *shape)  # as `model.learn` needs it


def _off_policy(
    model: Any, stream: EpisodeStream, weights: WeightPublisher, total_timesteps: int, merger: ConnectorMerger
) -> Iterator[int]:
    by_step, frequency = model.train_freq.unit.value == "step", model.train_freq.frequency
    passed = since = 0
    for batch in stream:
        merger.take(batch)
        before, steps = model.num_timesteps, batch.transitions()
        episodes, first = _count(model, batch, total_timesteps), 0
        while first < len(steps):
            # Between gradient steps come as many env steps as in SB3, and none within: its target network stands still.
            last = min(first + frequency - passed, len(steps)) if by_step else len(steps)
            store(model, steps, slice(first, last))
            model.num_timesteps = before + last
            for _ in range(first, last):
                model._on_step()  # DQN's target network and exploration rate
            since, passed = since + last - first, passed + (last - first if by_step else episodes)
            if passed >= frequency:
                rounds, passed = divmod(passed, frequency)
                due = since if model.gradient_steps < 0 else rounds * model.gradient_steps
                if due and model.num_timesteps > model.learning_starts:
                    model.train(gradient_steps=due, batch_size=model.batch_size)
                since = 0
            first = last
        if batch.steps:
            _tell(model, weights, merger)
            yield model.num_timesteps
        if model.num_timesteps >= total_timesteps:
            return


def store(model: Any, steps: Transitions, rows: slice = slice(None)) -> None:
    """Add the steps in `rows` to `model.replay_buffer`, each with the true observation after it.

    The buffer's arrays are then as after its `add` of each step, but are written by columns: `add` takes longer than
    all the rest of the adapter. `dones` and `timeouts` are as SB3 has them. A chunk that is cut, or whose episode was
    aborted, is not done.
    """
    buffer, first, last = model.replay_buffer, *rows.indices(len(steps))[:2]
    newest = np.arange(max(first, last - buffer.buffer_size), last)
    places = (buffer.pos + newest - first) % buffer.buffer_size
    _write(buffer.observations, places, map_arrays(lambda rows: rows[newest], steps.obs))
    _write(buffer.next_observations, places, map_arrays(lambda rows: rows[newest], steps.next_obs))
    buffer.actions[places] = steps.actions[newest].reshape(len(newest), 1, buffer.action_dim)
    buffer.rewards[places, 0] = steps.rewards[newest]
    buffer.dones[places, 0] = (steps.terminated | steps.truncated)[newest]
    if buffer.handle_timeout_termination:
        buffer.timeouts[places, 0] = steps.truncated[newest]
    buffer.full = bool(buffer.full or buffer.pos + last - first >= buffer.buffer_size)
    buffer.pos = (buffer.pos + last - first) % buffer.buffer_size


def _write(arrays: Any, places: NDArray[np.int64], obs: Any) -> None:
    """Write observations (rows, ...) into a replay buffer's arrays of one env. SB3 keeps a number as (1,)."""
    if isinstance(arrays, dict):
        for name, own in arrays.items():
            _write(own, places, obs[name])
    else:
        wide = obs[:, None]
        arrays[places] = wide if wide.ndim == arrays.ndim else wide[..., None]


def fill(model: Any, batches: Sequence[ChunkBatch]) -> int:
    """Put the steps of `batches` into `model.rollout_buffer`, with their advantages; return how many.

    The buffer gets as many rows. Each holds what SB3's own `collect_rollouts` would: at a time limit the reward
    contains the value of the last observation. Where an episode goes on in no chunk here, only the advantage does. Such
    values are those of the model as it is now, the others those that the workers' policy gave.

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
    episodes = episodes_of(own)
    last = episodes.last_rows
    values = np.empty(len(episodes) + len(last))
    values[episodes.step_rows] = episodes.columns["values"]
    values[last] = _values(model, map_arrays(lambda rows: rows[last], episodes.obs))
    returns = gae(episodes, values, gamma=model.gamma, gae_lambda=model.gae_lambda)
    rewards = episodes.rewards.copy()
    rewards[episodes.offsets[1:][episodes.truncated] - 1] += model.gamma * values[last[episodes.truncated]]
    starts = np.zeros(len(episodes), np.bool_)
    starts[episodes.offsets[:-1]] = np.concatenate([batch.table["t_start"] for batch in own]) == 0
    buffer = model.rollout_buffer
    _reshape(buffer, 1, len(episodes))
    buffer.add(
        map_arrays(lambda rows: rows[episodes.step_rows], episodes.obs),
        episodes.actions,
        rewards,
        starts,
        to_torch(episodes.columns["values"]),
        to_torch(episodes.columns["logp"]),
    )
    buffer.advantages[0], buffer.returns[0] = returns.advantages, returns.targets
    return len(episodes)


class _Figures:
    """A logger for a model without one. It keeps what SB3 records since the last update."""

    def __init__(self) -> None:
        self.name_to_value: dict[str, Any] = {}

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        self.name_to_value[key] = value

    def dump(self, step: int = 0) -> None:
        self.name_to_value.clear()


def _check(model: Any, stream: EpisodeStream) -> None:
    buffer: Any = getattr(model, "rollout_buffer", None) or getattr(model, "replay_buffer", None)
    name = type(buffer).__name__
    if type(buffer).__module__ != "stable_baselines3.common.buffers" or name not in _BUFFERS:
        raise ModuleError(f"{type(model).__name__} has a {name}, and this adapter fills {' or '.join(_BUFFERS)} alone")
    if "Replay" in name and (model.n_envs > 1 or model.action_noise is not None or buffer.optimize_memory_usage):
        raise ModuleError(
            f"this {type(model).__name__} must be built with one env, without action_noise and optimize_memory_usage: "
            "the envs and the exploration are the fleet's, and its chunks do not follow one another"
        )
    if model.use_sde or ("Replay" in name and not _acts_in_workers(model)):
        raise ModuleError(
            f"the policy of this {type(model).__name__} cannot act in workers: they take those of PPO, A2C, DQN and "
            "SAC, without gSDE (use_sde)"
        )
    if model.get_vec_normalize_env() is not None:
        raise ModuleError("the model's VecNormalize sees no step of the fleet; use the connector MeanStd and a merger")
    stream.spaces().check_gymnasium(model.observation_space, model.action_space, f"this {type(model).__name__}")


def _check_values(model: Any, batches: Sequence[ChunkBatch], weights: WeightPublisher, seq: int) -> None:
    """Raise `ModuleError` where workers with the weights of `model`, published as `seq`, value states in another way.

    Weights fit by names and shapes, which leave out such settings as `activation_fn`.
    """
    for batch in map(chosen, batches):
        steps = np.flatnonzero(batch.columns["weights_seq"] == seq)[:_COMPARED]
        if not len(steps) or batch.learner_epoch != weights.epoch:
            continue
        own = _values(model, map_arrays(lambda rows, at=steps: rows[at], batch.transitions().obs))
        told = batch.columns["values"][steps]
        if np.abs(own - told).mean() > 0.05 * np.abs(own).mean() + 1e-3:
            raise ModuleError(
                f"workers with the weights of this {type(model).__name__} value their first states at "
                f"{told.mean():.4g} on average, and it does at {own.mean():.4g}: its policy_kwargs, such as "
                "activation_fn, are not those of the fleet; give both the same, see module.config"
            )


def _acts_in_workers(model: Any) -> bool:
    """Return whether an off-policy model explores by what workers have of it: a Q-network, or SAC's distribution."""
    return hasattr(model, "q_net") or hasattr(getattr(model, "actor", None), "get_action_dist_params")


def _count(model: Any, batch: ChunkBatch, total_timesteps: int) -> int:
    """Note the steps and the finished episodes of `batch` as SB3 does; return the number of those episodes."""
    model.num_timesteps += batch.steps
    model._update_current_progress_remaining(min(model.num_timesteps, total_timesteps), total_timesteps)
    done = batch.table[np.isin(batch.table["end"], (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED))]
    told = zip(done["episode_return"].tolist(), done["episode_length"].tolist(), strict=True)
    model.ep_info_buffer.extend({"r": total, "l": length} for total, length in told)
    return len(done)


def _tell(model: Any, weights: WeightPublisher, merger: ConnectorMerger) -> None:
    """Publish what workers act with, and log what SB3 recorded, also where the weights have become NaN."""
    try:
        weights.publish(_acting(model, merger))
    finally:
        recorded = model.logger.name_to_value.items()
        weights.log({name: float(value) for name, value in recorded if isinstance(value, int | float | np.number)})
        model.logger.dump(model.num_timesteps)


def save_sb3_policy(
    run_dir: str | Path, model: Any, merger: ConnectorMerger | None = None, *, epoch: int | None = None
) -> Path:
    """Save what workers act with of `model` as RUN_DIR/learner.checkpoint, for `headrace evaluate` and `export`.

    That is the whole policy of PPO and A2C; the actor of SAC; the Q-network of DQN and its exploration rate. The counts
    are the model's. `merger` is that of `updates`. `epoch`, and the errors, are as for `headrace.save_policy`.
    """
    counts = {"updates": model._n_updates, "steps": model.num_timesteps}
    return save_policy(run_dir, _acting(model, merger or ConnectorMerger()), epoch=epoch, **counts)


def _acting(model: Any, merger: ConnectorMerger) -> dict[str, Any]:
    """Return the weights that workers act with, and the state of their connectors."""
    state: dict[str, Any] = model.policy.state_dict()
    if hasattr(model, "rollout_buffer"):
        return {**state, **merger.get_state()}
    acting = {name: tensor for name, tensor in state.items() if name.startswith(("actor.", "q_net."))}
    if hasattr(model, "exploration_rate"):
        acting["exploration_rate"] = torch.tensor(float(model.exploration_rate))
    return {**acting, **merger.get_state()}


def _reshape(buffer: Any, steps: int, envs: int) -> None:
    buffer.buffer_size, buffer.n_envs = steps, envs
    buffer.reset()


def _values(model: Any, obs: Any) -> NDArray[np.float64]:
    """Return the values (rows,) of `obs` by the model as it is."""
    model.policy.set_training_mode(False)
    with torch.no_grad():
        values: NDArray[Any] = model.policy.predict_values(model.policy.obs_to_tensor(obs)[0]).flatten().cpu().numpy()
    return values.astype(np.float64)
