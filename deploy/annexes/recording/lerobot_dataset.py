"""A recording as a dataset of LeRobot, a frame for each step: `LeRobotDataset(NAME, root="OUT")`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import orjson
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from headrace.deploy.annexes.recording.whole_episodes import is_picture
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.chunks.spaces import Space, Spaces, column_dtype, leaf_shape, leaf_values, leaves
from headrace.schemas.errors import ConfigError

_STATE, _PICTURES = "observation.state", "observation.images"
_MOST_AXES = 5
_ENDS = {"next.reward": "float32", "next.done": "bool", "next.truncated": "bool", "seed": "int64"}


def write(episodes: Iterable[EpisodeChunk], spaces: Spaces, folder: Path, *, fps: int) -> None:
    """Write the episodes. Pictures become videos. The format has no place for the observation after the last step."""
    names = {"obs": _names(spaces.observation, "obs"), "actions": _names(spaces.action, "actions")}
    features = {
        name: _feature(name, leaf)
        for root, space in (("obs", spaces.observation), ("actions", spaces.action))
        for name, (_, leaf) in zip(names[root], leaves(space, root), strict=True)
    }
    features |= {name: {"dtype": dtype, "shape": (1,), "names": None} for name, dtype in _ENDS.items()}
    datasets.disable_progress_bars()  # it shows some for each episode
    dataset = LeRobotDataset.create(folder.name, fps, features, root=folder)
    for episode in episodes:
        columns = dict(zip(names["obs"], leaf_values(spaces.observation, episode.obs), strict=True))
        columns |= zip(names["actions"], leaf_values(spaces.action, episode.actions), strict=True)
        task = orjson.dumps(episode.task.values if episode.task is not None else {}).decode()
        seed = np.array([-1 if episode.seed is None else episode.seed])
        for t in range(len(episode)):
            is_last = t == len(episode) - 1
            frame = {name: np.atleast_1d(column[t]) for name, column in columns.items()}
            frame |= {"next.reward": np.array([episode.rewards[t]], np.float32), "seed": seed}
            frame |= {"next.done": np.array([is_last]), "next.truncated": np.array([is_last and episode.is_truncated])}
            dataset.add_frame({**frame, "task": task})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Converting input from bool")  # it makes histograms of `next.done`
            dataset.save_episode()
    dataset.finalize()


def _names(space: Space, root: str) -> list[str]:
    """Return the name of each leaf: pictures and other observations apart, and no slash, which no name may have."""
    names = []
    for name, leaf in leaves(space, root):
        first = "action" if root == "actions" else _PICTURES if is_picture(leaf) else _STATE
        names.append(first + (name.removeprefix(root).replace("/", ".") or (".main" if first == _PICTURES else "")))
    if len(set(names)) != len(names):
        raise ConfigError(f"lerobot cannot hold these names apart: {', '.join(names):.200}", key="--to")
    return names


def _feature(name: str, leaf: Any) -> dict[str, Any]:
    shape: tuple[int, ...] = leaf_shape(leaf) or (1,)
    if name.startswith(_PICTURES):
        return {"dtype": "video", "shape": shape, "names": ["height", "width", "channels"]}
    if 0 in shape or len(shape) > _MOST_AXES:
        raise ConfigError(f"lerobot cannot hold {name!r:.80} of shape {shape}", key="--to")
    return {"dtype": column_dtype(leaf).name, "shape": shape, "names": None}
