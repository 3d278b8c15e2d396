"""Videos of episodes: an env that is another one, some of whose episodes gymnasium's recorder writes to files.

    EnvRunnerConfig(env="headrace.workers.envs.video:recorded", env_config={"env": "CartPole-v1", "folder": "videos"})

Being a name with plain values, it goes where any env goes: into a fleet.toml, and into a process of its own. It needs
moviepy (extra `video`). Chunks are those of the env without it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from pydantic import BaseModel, ConfigDict, Field

from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import build_env, find_creator


class Recording(BaseModel):
    """The `env_config` of `recorded`: which episodes, of which envs of which workers, go where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str
    """As in a runner's config; where it is recorded, its own `env_config` has render_mode "rgb_array" besides."""
    env_config: dict[str, Any] = {}
    folder: str = "videos"
    """Each life of an env has a folder of its own in it, so that nothing is written over."""
    every: int = Field(default=100, ge=1)
    """Of each env's episodes the first is recorded, and each so-and-so-manieth after it."""
    length: int = Field(default=0, ge=0)
    """Steps of a video; 0 is the whole episode. Its pictures are kept in memory until then."""
    lanes: list[int] = [0]
    """Vector indices."""
    workers: list[int] = [0]


def recorded(context: EnvContext) -> gym.Env[Any, Any]:
    """The creator: `Recording.env`, with a recorder around it where one is wanted.

    A video is written when the env is reset after its episode, or closed; a process that is killed writes none. Raises
    `pydantic.ValidationError` for an `env_config` that is none of `Recording`, `gymnasium.error.DependencyNotInstalled`
    without moviepy, `ValueError` for an env that has no such render mode, and what the env's creator raises.
    """
    recording = Recording.model_validate(dict(context))
    creator = find_creator(recording.env)
    if context.vector_index not in recording.lanes or context.worker_index not in recording.workers:
        return build_env(creator, context.with_config(recording.env_config))
    env = build_env(creator, context.with_config({**recording.env_config, "render_mode": "rgb_array"}))
    life = f"worker-{context.worker_index}-env-{context.vector_index}-{time.time_ns()}"
    return gym.wrappers.RecordVideo(
        env,
        str(Path(recording.folder) / life),
        episode_trigger=lambda episode: episode % recording.every == 0,
        video_length=recording.length,
        name_prefix="video",
    )
