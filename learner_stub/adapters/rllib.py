"""Batches as RLlib's episodes, for RLlib's `Learner` and connectors. Needs Ray with RLlib: pip install 'ray[rllib]'."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import DEFAULT_AGENT, EpisodeChunk
from headrace.schemas.chunks.chunk_arrays import join_columns, map_arrays
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError

_NAMES = {"logp": "action_logp", "values": "vf_preds"}
"""Headrace's columns that RLlib has under another name."""


def to_episodes(batch: ChunkBatch) -> list[Any]:
    """Return each chunk of `batch` as a `SingleAgentEpisode` with numpy data, as RLlib's env runners return them.

        learner.update(episodes=to_episodes(batch))

    - id_ is that of the episode, the same in all of its chunks. t_started is the step at which the chunk starts.
    - observations have T+1 rows. The last is the one after the last step, from which RLlib bootstraps; it is never that
      of the next reset. is_terminated and is_truncated are those of the env. A chunk that is cut has neither.
    - rewards are float32. actions are in the module's units.
    - extra_model_outputs: the batch's further columns. "logp" is "action_logp", "values" is "vf_preds", and
      "weights_seq_no" has the weights version of each step. Others, such as "action_dist_inputs", keep their names.
    - Steps before the chunk, which `episode_lookback_horizon` asks for, are its lookback buffer, without infos.
    - In an env of several agents each chunk has its agent_id and module_id, and the env's episode as its
      multi_agent_episode_id.

    The memory of recurrent modules is left out: RLlib needs it at every step, and a chunk has it before its first one.
    End markers, which have no step, are left out too. The arrays own their memory.

    Raises `ConfigError` where RLlib cannot be imported.
    """
    episode_class, buffer_class = _rllib()
    spaces = Spaces(observation=batch.observation_space, action=batch.action_space).to_gymnasium()
    return [_episode(chunk, episode_class, buffer_class, spaces) for chunk in batch if len(chunk)]


def _rllib() -> tuple[Any, Any]:
    try:
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode
        from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
    except ImportError as error:
        raise ConfigError(f"RLlib cannot be imported ({error}); pip install 'ray[rllib]'") from error
    return SingleAgentEpisode, InfiniteLookbackBuffer


def _episode(chunk: EpisodeChunk, episode_class: Any, buffer_class: Any, spaces: tuple[Any, Any]) -> Any:
    before = chunk.lookback
    lookback = len(before) if before is not None else 0

    def buffer(own: Any, earlier: Any) -> Any:
        made = buffer_class(join_columns([earlier, own]) if lookback else map_arrays(np.array, own))
        made.lookback = lookback  # its constructor bounds this by the number of keys, where the data is a dict
        return made

    columns = {**chunk.columns, "weights_seq_no": chunk.weights_seq}
    earlier = {**before.columns, "weights_seq_no": before.weights_seq} if before is not None else {}
    is_of_several = chunk.agent_id != DEFAULT_AGENT
    infos: list[Any] = [{} for _ in range(lookback)] + (chunk.infos or [{} for _ in range(len(chunk) + 1)])
    return episode_class(
        f"{chunk.episode_id}/{chunk.agent_id}" if is_of_several else chunk.episode_id,
        observations=buffer(chunk.obs, before and before.obs),
        observation_space=spaces[0],
        infos=buffer_class(infos, lookback),
        actions=buffer(chunk.actions, before and before.actions),
        action_space=spaces[1],
        rewards=buffer(chunk.rewards.astype(np.float32), before and before.rewards.astype(np.float32)),
        terminated=chunk.is_terminated,
        truncated=chunk.is_truncated,
        extra_model_outputs={
            _NAMES.get(name, name): buffer(column, earlier.get(name))
            for name, column in columns.items()
            if not lookback or name in earlier
        },
        t_started=chunk.t_start,
        agent_id=chunk.agent_id if is_of_several else None,
        module_id=chunk.module_id if is_of_several else None,
        multi_agent_episode_id=chunk.episode_id if is_of_several else None,
    )
