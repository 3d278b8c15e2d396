"""Videos of episodes: an env around another env, in which gymnasium's recorder writes some episodes to files.

    EnvRunnerConfig(env="headrace.workers.envs.video:recorded", env_config={"env": "CartPole-v1", "folder": "videos"})

It is named like any env, so it works in a fleet.toml and in a process of its own. It needs moviepy (extra `video`).
Chunks are the same as those of the env without it.
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
    """The `env_config` of `recorded`: the envs, workers and episodes to record, and the folder for videos."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str
    """As in a runner's config. An env that is recorded also gets render_mode "rgb_array" in its `env_config`."""
    env_config: dict[str, Any] = {}
    folder: str = "videos"
    """Each life of an env has its own folder in this one, so that no video is overwritten."""
    every: int = Field(default=100, ge=1)
    """Record each env's first episode, and then every n-th."""
    length: int = Field(default=0, ge=0)
    """Steps of a video; 0 is the whole episode. Pictures stay in memory until it is written."""
    lanes: list[int] = [0]
    """Vector indices."""
    workers: list[int] = [0]


def recorded(context: EnvContext) -> gym.Env[Any, Any]:
    """Return the env of `Recording.env`, with a recorder around it if the env is to be recorded.

    A video is written when the env is reset after its episode, or closed; a process that is killed writes none. Raises
    `pydantic.ValidationError` for an `env_config` that is no `Recording`, `gymnasium.error.DependencyNotInstalled`
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
