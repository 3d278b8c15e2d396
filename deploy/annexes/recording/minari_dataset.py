"""A recording as a dataset of Minari: `minari.MinariDataset("OUT/data")`, lossless also where there are images."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import minari
import numpy as np
import orjson
from minari.data_collector import EpisodeBuffer

from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.chunks.spaces import Dict, Space, Spaces, Tuple
from headrace.schemas.errors import ConfigError

_ID = re.compile(r"[-\w]+-v\d+")
_FOLDER = "MINARI_DATASETS_PATH"


def write(episodes: Iterable[EpisodeChunk], spaces: Spaces, folder: Path) -> None:
    """Write the episodes. The dataset has the folder's name, the metadata of each episode its ids, task and place."""
    if _ID.fullmatch(folder.name) is None:
        raise ConfigError(f"minari wants a name such as cartpole-v0, got {folder.name!r:.80}", key="--out")
    for space in (spaces.observation, spaces.action):
        _check_names(space)
    told: list[Mapping[str, Any]] = []
    observation_space, action_space = spaces.to_gymnasium()
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder.parent)  # Minari takes the path from there alone
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="minari")  # a recording knows no author, and no code
            dataset = minari.create_dataset_from_buffers(
                folder.name,
                _buffers(episodes, told),
                observation_space=observation_space,
                action_space=action_space,
                data_format="hdf5",
                jpeg_encoding=False,
            )
        dataset.storage.update_episode_metadata(told)
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before


def _check_names(space: Space) -> None:
    if isinstance(space, Dict):
        for name in space.spaces:
            if "/" in name:
                raise ConfigError(f"minari cannot hold the name {name!r:.80}, which has a slash", key="--to")
    if isinstance(space, Dict | Tuple):
        for sub in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            _check_names(sub)


def _buffers(episodes: Iterable[EpisodeChunk], told: list[Mapping[str, Any]]) -> Iterator[EpisodeBuffer]:
    for episode in episodes:
        last = np.arange(len(episode)) == len(episode) - 1
        task = {} if episode.task is None else {"task": orjson.dumps(episode.task.values).decode()}
        place = {"slot": episode.slot, "env_index": episode.env_index}
        told.append({"episode_id": episode.episode_id, "agent": episode.agent_id, **place, **task})
        yield EpisodeBuffer(
            seed=episode.seed,
            observations=episode.obs,
            actions=episode.actions,
            rewards=episode.rewards,
            terminations=last & episode.is_terminated,
            truncations=last & episode.is_truncated,
        )
