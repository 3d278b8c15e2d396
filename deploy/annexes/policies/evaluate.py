"""`headrace evaluate`: a trained policy judged by whole episodes, or the checkpoints of a run as they come."""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import typer

from headrace.deploy.fleet.roles import no_exit_from
from headrace.deploy.run.options import Asked
from headrace.deploy.run.saved_policy import ResolvedPolicy, Which, resolve_policy, settings_for
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.errors import ConfigError, ConnectorError, EnvError, ExitCode, ModuleError, RunDirError

log = logging.getLogger("headrace.deploy")

_NICENESS = 10


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """Options of `evaluate` beyond the configuration."""

    run: str
    which: Which = "newest"
    episodes: int = 100
    num_envs: int | None = None
    seed: int | None = None
    explore: bool = False
    render: Path | None = None
    render_episodes: int = 1
    as_json: bool = False


def evaluate(asked: Asked, options: EvaluateOptions) -> None:
    """Play whole episodes with the policy, and print what they returned. Stopped by a signal, it exits 1."""
    set_up_logging(Identity("", "evaluate"))
    from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
    from headrace.deploy.annexes.policies.evaluation import in_words

    video = EpisodeVideo(options.render, options.render_episodes) if options.render is not None else None
    policy = resolve_policy(options.run, asked, which=options.which)
    log.info(
        "headrace %s evaluates %s on %s, episodes: %d, explore %s; config: %s",
        version("headrace"),
        policy.saved.source,
        policy.config.sampling.env,
        options.episodes,
        "on" if options.explore else "off",
        policy.origin,
    )
    with no_exit_from(EnvError, "the env or the module"), video or nullcontext():
        told = _play(policy, options, video)
    if options.as_json:
        text = orjson.dumps(told).decode()
    else:
        text = in_words(told) + (f"\nvideo: {told['video']}" if told["video"] else "")
    say(text)
    if not told["complete"]:
        log.warning("stopped after %d of %d episodes", told["episodes"], options.episodes)
        raise typer.Exit(int(ExitCode.FAILURE))


def _play(policy: ResolvedPolicy, options: EvaluateOptions, video: Any) -> dict[str, Any]:
    from headrace.deploy.annexes.policies.evaluation import Evaluation, PlaySettings
    from headrace.workers.fleet.user_side import envs_apart

    saved, began = policy.saved, time.monotonic()
    settings = PlaySettings(options.episodes, options.num_envs, options.seed or 0, options.explore)
    with (
        envs_apart() as calls,
        Evaluation(policy.config, settings, video, calls) as evaluation,
        stop_event() as stopping,
    ):
        try:
            scores = evaluation.play(saved.arrays, saved.version, stopping)
        except (ModuleError, ConnectorError) as error:
            raise policy.build_error(error) from error
    return {
        "source": saved.source,
        "weights": saved.version,
        "env": policy.config.sampling.env,
        "explore": settings.explore,
        "seed": settings.seed,
        **scores.as_json(),
        "seconds": round(time.monotonic() - began, 3),
        "video": str(options.render) if options.render else None,
    }


def watch(asked: Asked, options: EvaluateOptions) -> None:
    """Evaluate the run's checkpoints while it trains, until told to stop. Training comes first where cores are few."""
    os.nice(_NICENESS)
    run_dir = Path(options.run)
    if not run_dir.is_dir():
        raise RunDirError(options.run, "there is no such folder; --watch needs the run directory of a fleet")
    asked = settings_for(options.run, asked)
    resolved = asked.settings
    set_up_logging(Identity(resolved.fleet.fleet_id, "evaluator"))
    if not resolved.learner.evaluate_every_steps:
        raise ConfigError(
            "is 0, so there is nothing to wait for; give --set learner.evaluate_every_steps=20000",
            key="learner.evaluate_every_steps",
        )
    from headrace.deploy.annexes.policies.evaluator import EPISODES
    from headrace.deploy.annexes.policies.evaluator import watch as watch_run

    log.info(
        "headrace %s evaluator of %s: %d episodes every %s steps; config: %s",
        version("headrace"),
        run_dir,
        EPISODES,
        f"{resolved.learner.evaluate_every_steps:,}",
        asked.origin,
    )
    with no_exit_from(EnvError, "the env or the module"), stop_event() as stopping:
        watch_run(resolved, run_dir, options.num_envs, options.seed, stopping)
