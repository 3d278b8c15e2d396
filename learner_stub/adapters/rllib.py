"""Batches as RLlib's episodes, for RLlib's `Learner` and connectors. Needs Ray with RLlib: pip install 'ray[rllib]'."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import STATE_IN, ChunkBatch
from headrace.schemas.chunks.chunk import DEFAULT_AGENT, LOOKBACK, ChunkEnd, format_episode_id, map_arrays
from headrace.schemas.chunks.episodes import ranges
from headrace.schemas.chunks.spaces import Spaces, nest
from headrace.schemas.errors import ConfigError

_NAMES = {"logp": "action_logp", "values": "vf_preds", "weights_seq": "weights_seq_no"}
"""Headrace's columns that RLlib has under another name."""
_NO_OUTPUTS = ("obs", "actions", "rewards", "env_t")
"""Columns, or their roots, that are not among an episode's `extra_model_outputs`."""


def to_episodes(batch: ChunkBatch) -> list[Any]:
    """Return each chunk of `batch` as a `SingleAgentEpisode` with numpy data, as RLlib's env runners return them.

        learner.update(episodes=to_episodes(batch))

    - id_ is that of the episode, the same in all of its chunks. t_started counts its agent's steps before the chunk.
    - observations have T+1 rows. The last is the one after the last step, from which RLlib bootstraps; it is never that
      of the next reset. is_terminated and is_truncated are those of the env. A chunk that is cut has neither.
    - rewards are float32. actions are in the module's units.
    - extra_model_outputs: the batch's further columns. "logp" is "action_logp", "values" is "vf_preds", and
      "weights_seq_no" has the weights version of each step. Others, such as "action_dist_inputs", keep their names.
    - Steps before the chunk, which `episode_lookback_horizon` asks for, are its lookback buffer, without infos and
      columns that `with_own_logp` made.
    - In an env of several agents each chunk has its agent_id and module_id, and the env's episode as its
      multi_agent_episode_id.

    The memory of recurrent modules is left out: RLlib needs it at every step, and a chunk has it before its first one.
    End markers, which have no step, are left out too. The arrays are the caller's. Episodes of one batch share one copy
    of its columns, which is freed with the last of them.

    Raises `ConfigError` where RLlib cannot be imported.
    """
    episode_class, buffer_class = _rllib()
    spaces = Spaces(observation=batch.observation_space, action=batch.action_space)
    observation_space, action_space = _gymnasium(spaces.model_dump_json())
    rows = {name: _rows(batch, name) for name in batch.arrays if not name.startswith((STATE_IN, LOOKBACK))}
    obs, actions = nest(spaces.observation, rows, "obs"), nest(spaces.action, rows, "actions")
    rewards = rows["rewards"].astype(np.float32)
    outputs = {_NAMES.get(n, n): column for n, column in rows.items() if n.partition("/")[0] not in _NO_OUTPUTS}
    # All that differs from chunk to chunk, as lists: single records of numpy are slow to read.
    table = {name: batch.table[name].tolist() for name in batch.table.dtype.names or ()}
    bounds, obs_bounds = ((batch.lookback_offsets + own).tolist() for own in (batch.offsets, batch.obs_offsets))
    own_bounds, looks_back = batch.offsets.tolist(), {_NAMES.get(n, n): n in batch.lookback for n in rows}

    def episode(i: int) -> Any:
        lookback, agent, end = table["lookback"][i], batch.agents[table["agent"][i]], table["end"][i]

        def buffer(columns: Any, part: slice, lookback: int = lookback) -> Any:
            made = buffer_class(map_arrays(itemgetter(part), columns))
            made.lookback = lookback  # its constructor bounds this by the number of keys, where the data is a dict
            return made

        steps, own, observations = (slice(at[i], at[i + 1]) for at in (bounds, own_bounds, obs_bounds))
        id_, is_of_several = format_episode_id(table["id_high"][i], table["id_low"][i]), agent != DEFAULT_AGENT
        infos = batch.infos.get(i, {})
        return episode_class(
            f"{id_}/{agent}" if is_of_several else id_,
            observations=buffer(obs, observations),
            observation_space=observation_space,
            infos=buffer_class([infos.get(t, {}) for t in range(-lookback, table["length"][i] + 1)], lookback),
            actions=buffer(actions, steps),
            action_space=action_space,
            rewards=buffer(rewards, steps),
            terminated=end == ChunkEnd.TERMINATED,
            truncated=end == ChunkEnd.TRUNCATED,
            extra_model_outputs={
                n: buffer(c, steps) if looks_back[n] else buffer(c, own, 0) for n, c in outputs.items()
            },
            t_started=table["episode_length"][i] - table["length"][i],
            agent_id=agent if is_of_several else None,
            module_id=batch.modules[table["module"][i]] if is_of_several else None,
            multi_agent_episode_id=id_ if is_of_several else None,
        )

    return [episode(i) for i in range(len(batch)) if table["length"][i]]


def _rllib() -> tuple[Any, Any]:
    try:
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode
        from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
    except ImportError as error:
        raise ConfigError(f"RLlib cannot be imported ({error}); pip install 'ray[rllib]'") from error
    return SingleAgentEpisode, InfiniteLookbackBuffer


@lru_cache(maxsize=64)
def _gymnasium(spaces: str) -> tuple[Any, Any]:
    """Return gymnasium's spaces for those written as JSON. To build them takes as long as ten episodes."""
    return Spaces.model_validate_json(spaces).to_gymnasium()


def _rows(batch: ChunkBatch, name: str) -> NDArray[Any]:
    """Return a copy of a column in which the rows of each chunk follow those of its lookback."""
    own, back, offsets = batch.arrays[name], batch.lookback_offsets, batch.offsets_of(name)
    if not back[-1] or name not in batch.lookback:
        return own.copy()
    starts = np.stack((back[:-1], back[-1] + offsets[:-1]), 1)
    lengths = np.stack((np.diff(back), np.diff(offsets)), 1)
    return np.concatenate((batch.lookback[name], own))[ranges(starts.ravel(), lengths.ravel())]
