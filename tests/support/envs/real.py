"""Envs that people train on, as their creators make them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.workers import EnvContext


def minigrid(context: EnvContext) -> gym.Env[Any, Any]:
    """Doors and keys seen as an image; the mission, a text, is left out."""
    import minigrid
    from minigrid.wrappers import ImgObsWrapper

    gym.register_envs(minigrid)
    return ImgObsWrapper(gym.make("MiniGrid-DoorKey-5x5-v0", max_steps=30))


def atari(context: EnvContext) -> gym.Env[Any, Any]:
    """Breakout with the usual preprocessing: four frames of 84x84 in grey, of which the policy sees a stack."""
    import ale_py

    gym.register_envs(ale_py)
    raw = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(raw, terminal_on_life_loss=True), 4)


def mujoco(context: EnvContext) -> gym.Env[Any, Any]:
    """The pole on a cart, which falls soon."""
    return gym.make("InvertedPendulum-v5")


def cheetah(context: EnvContext) -> gym.Env[Any, Any]:
    """It never falls: only time ends its episodes."""
    return gym.make("HalfCheetah-v5", max_episode_steps=25)
