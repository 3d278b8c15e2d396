"""`headrace evaluate`: a trained policy judged by whole episodes, or the checkpoints of a run as they come."""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import typer

from headrace.deploy.fleet.roles import no_exit_from
from headrace.deploy.run.options import Asked
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
from headrace.deploy.trained.saved_policy import ResolvedPolicy, Which, resolve_policy, settings_for
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.errors import ConfigError, ConnectorError, EnvError, ExitCode, ModuleError, RunDirError

if TYPE_CHECKING:  # torch takes a second or two
    from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
    from headrace.deploy.annexes.policies.evaluation import PlaySettings

log = logging.getLogger("headrace.deploy")

_NICENESS = 10


def evaluate(
    asked: Asked,
    run: str,
    *,
    which: Which,
    episodes: int,
    num_envs: int | None,
    seed: int | None,
    explore: bool,
    render: Path | None,
    render_episodes: int,
    as_json: bool,
) -> None:
    """Play whole episodes with the policy, and print what they returned. Stopped by a signal, it exits 1."""
    set_up_logging(Identity("", "evaluate"))
    from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
    from headrace.deploy.annexes.policies.evaluation import PlaySettings, in_words

    video = EpisodeVideo(render, render_episodes) if render is not None else None
    policy = resolve_policy(run, asked, which=which)
    log.info(
        "headrace %s evaluates %s on %s, episodes: %d, explore %s; config: %s",
        version("headrace"),
        policy.saved.source,
        policy.config.sampling.env,
        episodes,
        "on" if explore else "off",
        policy.origin,
    )
    with no_exit_from(EnvError, "the env or the module"), video or nullcontext():
        told = _play(policy, PlaySettings(episodes, num_envs, seed or 0, explore), video)
    if as_json:
        text = orjson.dumps(told).decode()
    else:
        text = in_words(told) + (f"\nvideo: {told['video']}" if told["video"] else "")
    say(text)
    if not told["complete"]:
        log.warning("stopped after %d of %d episodes", told["episodes"], episodes)
        raise typer.Exit(int(ExitCode.FAILURE))


def _play(policy: ResolvedPolicy, settings: PlaySettings, video: EpisodeVideo | None) -> dict[str, Any]:
    from headrace.deploy.annexes.policies.evaluation import Evaluation
    from headrace.workers.fleet.user_side import envs_apart

    saved, began = policy.saved, time.monotonic()
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
        "video": str(video.path) if video is not None else None,
    }


def watch(asked: Asked, run: str, *, num_envs: int | None, seed: int | None) -> None:
    """Evaluate the run's checkpoints while it trains, until told to stop. Training comes first where cores are few."""
    os.nice(_NICENESS)
    run_dir = Path(run)
    if not run_dir.is_dir():
        raise RunDirError(run, "there is no such folder; --watch needs the run directory of a fleet")
    asked = settings_for(run, asked)
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
        watch_run(resolved, run_dir, num_envs, seed, stopping)
