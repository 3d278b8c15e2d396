"""Evaluation of a policy: whole episodes with the real runner, and their returns."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import orjson

from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
from headrace.schemas.accounts.aborted_episodes import aborted_in_words
from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import ConfigError, EnvError
from headrace.schemas.messages.weights import Arrays
from headrace.schemas.settings.config import FleetConfig
from headrace.workers.config import EnvRunnerConfig, runner_config
from headrace.workers.envs.driver import own_driver
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.runner.single_agent_env_runner import open_runner

log = logging.getLogger("headrace.deploy")

Values = Mapping[str, Any] | None
_PROGRESS_S = 5.0
_INCARNATION = 2**31 - 1
"""Incarnation of the evaluation's runner. No worker reaches it, so evaluation and training share no seed."""
_SERVE = "serve the policy with `headrace serve`, whose summary has the clients' returns"


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """Settings of an evaluation. The same settings and weights give the same episodes if the env repeats by its seed.

    With `num_envs` None, there are as many envs as in training. There are never more envs than episodes.
    """

    episodes: int = 100
    num_envs: int | None = None
    seed: int = 0
    explore: bool = False


@dataclass(slots=True)
class EpisodeScores:
    """Returns and lengths of the first episodes of each env.

    Each env has its own share of the episodes. Counting the first episodes to end in any env would favour short ones.
    """

    left: list[int]
    """Number of episodes that each env has still to play."""
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    by_agent: dict[str, list[float]] = field(default_factory=dict)
    by_policy: dict[str, list[float]] = field(default_factory=dict)
    """Returns of each episode by policy id, summed over the policy's agents; empty in envs of one agent."""
    aborted: int = 0
    """Number of episodes of the shares that failed with their env, which plays another one in place of each."""

    @classmethod
    def of(cls, episodes: int, num_envs: int) -> EpisodeScores:
        """Return empty scores for `episodes` shared among the envs."""
        return cls([episodes // num_envs + (env < episodes % num_envs) for env in range(num_envs)])

    @property
    def complete(self) -> bool:
        """Return whether all episodes have ended."""
        return not any(self.left)

    def add(self, episode: Any, env_index: int) -> None:
        """Add an ended episode, unless the env's share is complete."""
        if not self.left[env_index]:
            return
        self.left[env_index] -= 1
        self.returns.append(episode.episode_return)
        self.lengths.append(len(episode))
        by_policy: dict[str, float] = {}
        for agent, own in getattr(episode, "agents", {}).items():
            self.by_agent.setdefault(str(agent), []).append(own.episode_return)
            by_policy[own.module_id] = by_policy.get(own.module_id, 0.0) + own.episode_return
        for module_id, earned in by_policy.items():
            self.by_policy.setdefault(module_id, []).append(earned)

    def as_json(self) -> dict[str, Any]:
        """Return the scores as plain values for JSON; None for a distribution without values."""
        several = {
            name: {key: distribution(values) for key, values in sorted(by_key.items())}
            for name, by_key in (("return_by_agent", self.by_agent), ("return_by_policy", self.by_policy))
            if by_key
        }
        return {
            "episodes": len(self.returns),
            "complete": self.complete,
            "aborted": self.aborted,
            "env_steps": sum(self.lengths),
            "return": distribution(self.returns),
            "length": distribution(self.lengths),
            **several,
        }


def distribution(values: list[float] | list[int]) -> dict[str, float] | None:
    """Return mean, standard deviation, extremes and quantiles of `values`; None where there are none."""
    if not values:
        return None
    array = np.array(values, np.float64)
    quantiles = np.quantile(array, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
    return {
        "mean": float(array.mean()),
        "std": float(array.std()),
        "min": float(array.min()),
        "max": float(array.max()),
        **dict(zip(("q05", "q25", "median", "q75", "q95"), quantiles, strict=True)),
    }


class _EnoughError(Exception):
    """All episodes have ended, or a stop was asked for."""


class Evaluation:
    """Plays whole episodes of the env that `config` names. Use it within `with`: it owns the envs.

    The envs are those of the config, in this process or in processes of their own. Raises `ConfigError` or `EnvError`
    for envs that only clients drive, and what a runner raises.
    """

    def __init__(
        self,
        config: FleetConfig,
        settings: PlaySettings,
        video: EpisodeVideo | None = None,
        calls: CallMark | None = None,
    ) -> None:
        if config.serving.enabled:
            why = "clients drive this fleet's episodes, so there is nothing to step here"
            raise ConfigError(f"{why}; {_SERVE}, or give --set serving.enabled=false", key="serving.enabled")
        self._settings, self._video = settings, video
        self._num_envs = min(settings.num_envs or config.sampling.num_envs, settings.episodes)
        self._scores = EpisodeScores.of(settings.episodes, self._num_envs)
        self._lacks_task = False
        """True after an episode without a task: the runner leaves a task out after some failed resets."""
        self._runner = open_runner(
            self._runner_config(config), config.fleet.workers, incarnation=_INCARNATION, calls=calls
        )
        try:
            if own_driver(self._runner.env, several_agents=config.sampling.is_multi_agent) is not None:
                raise EnvError(f"{config.sampling.env} drives its own episodes, so nothing can step it here; {_SERVE}")
            self._runner.freeze_connectors()
            self._streams = self._runner.get_state(components=["random_streams"])["random_streams"]
        except BaseException:
            self._runner.stop()
            raise

    def _runner_config(self, config: FleetConfig) -> EnvRunnerConfig:
        own = runner_config(config)
        placement = "process" if own.env_placement == "remote" else own.env_placement
        events = {"on_episode_start": self._started, "on_episode_end": self._ended, "on_env_failed": self._failed}
        callbacks = [*own.callbacks, events]
        changed: dict[str, Any] = {
            "num_envs": self._num_envs,
            "seed": self._settings.seed,
            "explore": self._settings.explore,
            "batch_mode": "truncate_episodes",
            "gym_env_vectorize_mode": None,
            "double_buffering": False,
            "remote_env_batch_wait_ms": None,
            "env_placement": placement,
            "callbacks": callbacks,
        }
        if self._video is not None:
            changed |= {
                "env_placement": "inline",
                "env": self._video.env_creator(own.env),
                "callbacks": [*callbacks, self._video],
            }
        return own.model_copy(update=changed)

    def _ended(self, episode: Any, env_index: int) -> None:
        self._scores.add(episode, env_index)

    def _started(self, episode: Any) -> None:
        self._lacks_task |= episode.task is None

    def _failed(self, env_index: int) -> None:
        self._scores.aborted += bool(self._scores.left[env_index])

    def play(self, arrays: Arrays, version: Version, stopping: threading.Event, task: Values = None) -> EpisodeScores:
        """Play all episodes with the weights and connector state in `arrays`. A second call plays the same episodes.

        The envs get `task` at each reset, as workers give it. Raises `EnvError` for one that they refuse.
        Returns sooner once `stopping` is set, with the episodes that have ended. Raises `ModuleError` and
        `ConnectorError` for arrays that do not fit, and the errors that end a worker.
        """
        self._scores = scores = EpisodeScores.of(self._settings.episodes, self._num_envs)
        self._runner.set_state({"random_streams": self._streams})
        self._runner.set_weights(arrays, version[1], version[0])
        self._runner.set_tasks(task)
        self._lacks_task = False
        before, say_at = self._runner.totals.env_steps, time.monotonic() + _PROGRESS_S

        def on_poll() -> None:
            nonlocal say_at
            if task is not None and self._lacks_task:
                why = self._runner.totals.newest_env_failure
                raise EnvError(f"{self._runner.config.env!r:.100} refuses the task {task!r:.200}: {why}")
            if scores.complete or stopping.is_set():
                raise _EnoughError
            if self._video is not None:
                self._video.check()
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + _PROGRESS_S
                mean = f", mean return {np.mean(scores.returns):.4g}" if scores.returns else ""
                left_out = aborted_in_words(len(scores.returns), scores.aborted)
                mean += f" ({left_out})" if left_out else ""
                told = len(scores.returns), self._settings.episodes, f"{self._runner.totals.env_steps - before:,}", mean
                log.info("%d of %d episodes have ended after %s env steps%s", *told)

        try:
            while True:
                self._runner.sample_fragment(on_poll)
                on_poll()
        except _EnoughError:
            self._runner.discard_open(Discard.RESET)
            return scores

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.stop()


def in_words(told: Mapping[str, Any]) -> str:
    """Return the result of `EpisodeScores.as_json` for people: a line for all, and one for each agent and policy."""
    task = f"task {orjson.dumps(told['task']).decode()}\n" if told.get("task") is not None else ""
    share = f" ({100 * told['aborted'] / (told['episodes'] + told['aborted']):.2g} %)" if told["aborted"] else ""
    aborted = f"\naborted {told['aborted']}{share}: an env failed, and played another episode" if share else ""
    if not told["episodes"]:
        return f"{task}no episode has ended{aborted}"
    lines = [("return", told["return"]), ("length", told["length"])]
    for name, title in (("return_by_agent", "return of agent"), ("return_by_policy", "return of policy")):
        lines += [(f"{title} {key}", own) for key, own in told.get(name, {}).items()]
    width = max(len(title) for title, _ in lines)
    rows = (
        f"{title:<{width}}  mean {d['mean']:.4g}  std {d['std']:.4g}  min {d['min']:.4g}  5% {d['q05']:.4g}  "
        f"25% {d['q25']:.4g}  median {d['median']:.4g}  75% {d['q75']:.4g}  95% {d['q95']:.4g}  max {d['max']:.4g}"
        for title, d in lines
    )
    return task + "\n".join(rows) + aborted
