"""A film of a recorded episode: its own pictures, else those of an env that gets the same seed, task and actions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.deploy.annexes.recording.recorded_stream import RecordedStream
from headrace.deploy.annexes.recording.whole_episodes import is_picture
from headrace.deploy.run.annexes import part
from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.schemas.chunks.spaces import Spaces, leaf_values, leaves
from headrace.schemas.errors import ChunkError, ConfigError, EnvError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.fleet.user_side import envs_apart
from headrace.workers.reruns.episode_trail import digests
from headrace.workers.reruns.failure_files import FailureFacts, KeptFailure

_KEY = "--episode"


def find_episode(recording: str, which: str) -> tuple[EpisodeChunk, Spaces]:
    """Return the "best" or "worst" whole episode by return, or the one whose id begins with `which`.

    Of several agents' it is the first. Raises `ConfigError`.
    """
    with RecordedStream(recording) as stream:
        rows = stream.episodes().select(["episode_id", "agent", "module", "end", "episode_return"]).to_pylist()
    if which in ("best", "worst"):
        over = [row for row in rows if row["end"] in ("TERMINATED", "TRUNCATED")]
        found = sorted(over, key=lambda row: row["episode_return"], reverse=which == "best")
    else:
        found = [row for row in rows if row["episode_id"].startswith(which)]
        if len({row["episode_id"] for row in found}) > 1:
            raise ConfigError(f"{which!r:.80} begins the ids of several episodes; give more digits", key=_KEY)
    if not found:
        raise ConfigError(f"{recording} has no episode {which!r:.80}; it is best, worst or an id", key=_KEY)
    for row in found:
        with suppress(ChunkError):
            return _whole(recording, row)
    raise ConfigError(f"the recording lacks steps of episode {found[-1]['episode_id']}", key=_KEY)


def _whole(recording: str, row: Mapping[str, Any]) -> tuple[EpisodeChunk, Spaces]:
    """Return the episode of a row of the table of episodes. Raises `ChunkError` if steps are missing."""
    own = {name: row[name] for name in ("episode_id", "agent", "module")}
    with RecordedStream(recording, keep=lambda each: own.items() <= each.items()) as stream:
        episode = to_episode([chunk for batch in stream for chunk in batch])
        if episode.episode_length != len(episode):
            raise ChunkError("its first steps are missing")
        return episode, stream.spaces(row["module"])


def pictures_of(episode: EpisodeChunk, spaces: Spaces) -> Any:
    """Return the episode's first observations that are pictures, (T+1, height, width, 3); None without any."""
    arrays = leaf_values(spaces.observation, episode.obs)
    kinds = [leaf for _, leaf in leaves(spaces.observation, "obs")]
    return next((array for leaf, array in zip(kinds, arrays, strict=True) if is_picture(leaf)), None)


def film(pictures: Any, path: Path, frames_per_s: float) -> int:
    """Write the pictures to an MP4 file, and return their number. Raises `ConfigError` and `EnvError`."""
    with part("EpisodeVideo")(path) as video:
        for picture in pictures:
            video.show(picture, frames_per_s)
    return len(pictures)


def film_env(episode: EpisodeChunk, spaces: Spaces, config: EnvRunnerConfig, path: Path) -> int:
    """Build the env, and write what it shows while it plays the episode. Return the number of pictures.

    Raises `ConfigError` for an episode that cannot be repeated, and `EnvError` for an env that gives no pictures,
    fails, or departs from the recording.
    """
    if config.is_multi_agent:
        raise ConfigError("an env of several agents shows only recorded pictures", key=_KEY)
    if episode.seed is None:
        raise ConfigError(f"episode {episode.episode_id} began without a seed, so no env can repeat it", key=_KEY)
    kept = KeptFailure(f"episode {episode.episode_id}", _facts(episode, config), _arrays(episode, spaces, config))
    with part("EpisodeVideo")(path) as video, envs_apart() as calls:
        shown = config.model_copy(update={"env": video.env_creator(config.env, of_each=True)})
        repeated = part("repeat")(shown, kept, calls, watch=video.watch, apart=False)
        if repeated.error is None and repeated.end is not episode.end and episode.is_done:
            repeated.note(f"it ends as {repeated.end.name}, and the recording as {episode.end.name}")
        if repeated.error is not None:
            raise EnvError(f"the env failed at {repeated.at} of the episode: {repeated.error}") from repeated.error
        if repeated.difference:
            raise EnvError(
                f"the env departs from the recording at {repeated.differs_at or repeated.at} ({repeated.difference}): "
                "it is another one, is not deterministic, or keeps something from one episode to the next"
            )
    return int(video.frames)


def _facts(episode: EpisodeChunk, config: EnvRunnerConfig) -> FailureFacts:
    return FailureFacts(
        env=str(config.env),
        env_config={},
        worker_index=episode.slot,
        num_workers=config.num_workers,
        num_envs=config.num_envs,
        lane=episode.env_index,
        recreated=False,
        making_seeds=(None, None),
        seed=episode.seed,
        task=None if episode.task is None else episode.task.as_json(),
        steps=len(episode),
        problem="",
        at="",
        error="",
        message="",
    )


def _arrays(episode: EpisodeChunk, spaces: Spaces, config: EnvRunnerConfig) -> Mapping[str, Any]:
    """Return the env's actions, the rewards, and the observations where connectors did not change them."""
    arrays: dict[str, Any] = {"rewards": episode.rewards}
    names = [name for name, _ in leaves(spaces.action, "actions")]
    for_env = {n: column for n, column in episode.columns.items() if n.partition("/")[0] == "actions_for_env"}
    arrays |= {name.replace("actions_for_env", "actions", 1): column for name, column in for_env.items()} or dict(
        zip(names, leaf_values(spaces.action, episode.actions), strict=True)
    )
    if not config.env_to_module:
        names = [name for name, _ in leaves(spaces.observation, "obs")]
        columns = leaf_values(spaces.observation, episode.obs)
        arrays |= {name: digests(column[:-1]) for name, column in zip(names, columns, strict=True)}
    return arrays
