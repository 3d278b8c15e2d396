"""A recording as a dataset of Hugging Face `datasets`, a row for each step: `datasets.load_from_disk("OUT")`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import orjson
from numpy.typing import NDArray

from headrace.deploy.annexes.recording.whole_episodes import is_picture
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.chunks.spaces import Leaf, Spaces, column_dtype, leaf_shape, leaf_values, leaves
from headrace.schemas.errors import ConfigError

_OBS, _FINAL, _ACTION = "observation", "final_observation", "action"
_OF_STEP = {"reward": "float64", "terminated": "bool", "truncated": "bool", "t": "int64", "weights_seq": "int64"}
_OF_EPISODE = {"episode_id": "string", "agent": "string", "seed": "int64", "task": "string"}


def write(episodes: Iterable[EpisodeChunk], spaces: Spaces, folder: Path) -> None:
    """Write the episodes. `final_observation` is there in the last row of each."""
    told = {name: datasets.Value(dtype) for name, dtype in {**_OF_STEP, **_OF_EPISODE}.items()}
    for root, space in ((_OBS, spaces.observation), (_FINAL, spaces.observation), (_ACTION, spaces.action)):
        told |= {name: _feature(name, leaf) for name, leaf in leaves(space, root)}
    # The cache goes with its folder.
    options = {"fingerprint": "headrace", "cache_dir": str(folder.with_name(".cache"))}
    datasets.disable_progress_bars()
    try:
        dataset = datasets.Dataset.from_generator(
            lambda: _rows(episodes, spaces), features=datasets.Features(told), **options
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    dataset.save_to_disk(str(folder))


def _feature(name: str, leaf: Leaf) -> Any:
    if is_picture(leaf):
        return datasets.Image()
    shape, feature = leaf_shape(leaf), datasets.Value(column_dtype(leaf).name)
    if 0 in shape:
        raise ConfigError(f"hf cannot hold {name!r:.80} of shape {shape}", key="--to")
    for length in reversed(shape):  # an `Array2D` would not be null before the last step
        feature = datasets.Sequence(feature, length=length)
    return feature


def _rows(episodes: Iterable[EpisodeChunk], spaces: Spaces) -> Iterator[dict[str, Any]]:
    for episode in episodes:
        obs = _named(spaces.observation, episode.obs, _OBS)
        final = _named(spaces.observation, episode.obs, _FINAL)
        actions = _named(spaces.action, episode.actions, _ACTION)
        steps = len(episode)
        task = None if episode.task is None else orjson.dumps(episode.task.values).decode()
        of_episode = {"episode_id": episode.episode_id, "agent": episode.agent_id, "seed": episode.seed, "task": task}
        for t in range(steps):
            is_last = t == steps - 1
            yield {
                **{name: column[t] for name, column in obs.items()},
                **{name: column[t] for name, column in actions.items()},
                **{name: column[-1] if is_last else None for name, column in final.items()},
                "reward": episode.rewards[t],
                "terminated": is_last and episode.is_terminated,
                "truncated": is_last and episode.is_truncated,
                "t": episode.env_t[t],
                "weights_seq": episode.weights_seq[t],
                **of_episode,
            }


def _named(space: Any, tree: Any, root: str) -> dict[str, NDArray[Any]]:
    names = [name for name, _ in leaves(space, root)]
    return dict(zip(names, leaf_values(space, tree), strict=True))
