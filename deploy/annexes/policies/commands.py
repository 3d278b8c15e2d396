"""The commands about a trained policy: `evaluate` plays whole episodes, `export` writes a file for other programs."""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.annexes import part
from headrace.deploy.run.evaluation_log import doubt_of
from headrace.deploy.run.options import Asked
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import (
    ConfigError,
    ConnectorError,
    EncodeError,
    EnvError,
    ExitCode,
    ModuleError,
    RunDirError,
    is_there,
)

if TYPE_CHECKING:  # torch takes a second or two
    from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
    from headrace.deploy.annexes.policies.evaluation import PlaySettings
    from headrace.deploy.trained.saved_policy import ResolvedPolicy

log = logging.getLogger("headrace.deploy")
app = typer.Typer()

_EPISODES, _NICENESS = 100, 10


class CheckpointChoice(StrEnum):
    """The checkpoints of a run directory."""

    NEWEST = "newest"
    BEST = "best"


RUN_HELP = "A run directory, a checkpoint file, or redis://HOST:PORT."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Checkpoint = Annotated[
    CheckpointChoice, typer.Option("--checkpoint", help="Of a run directory: the newest checkpoint, or the best one.")
]


@command(
    app,
    "headrace evaluate runs/a --episodes 100",
    "headrace evaluate runs/a --checkpoint best --render best.mp4",
    "headrace evaluate runs/a/best.checkpoint --seed 7 --json",
    "headrace evaluate redis://127.0.0.1:6379 --fleet-id demo --env CartPole-v1",
    "headrace evaluate runs/a --task '{\"level\": 3}' --task '{\"level\": 4}'",
    "headrace evaluate runs/a --watch --set learner.evaluate_every_steps=20000",
    options="run episodes checkpoint num_envs seed task explore render render_episodes watch env fleet_id config sets"
    " allow as_json accept_aborted",
)
def evaluate(
    asked: Asked,
    *,
    run: Run,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Whole episodes to play.")] = _EPISODES,
    checkpoint: Checkpoint = CheckpointChoice.NEWEST,
    num_envs: Annotated[
        int | None, typer.Option("--num-envs", min=1, help="Environments stepped together; default: as in training.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Of the episodes; default 0, with --watch the run's. A seed repeats them."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="JSON", help="A task for the envs; several: a result each.")
    ] = None,
    explore: bool,
    render: Annotated[Path | None, typer.Option("--render", help="MP4 file for a video (extra video).")] = None,
    render_episodes: Annotated[
        int, typer.Option("--render-episodes", min=1, help="Episodes of the first env in the video.")
    ] = 1,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Evaluate checkpoints as they come, every learner.evaluate_every_steps, into evaluations.jsonl.",
        ),
    ] = False,
    as_json: bool,
    accept_aborted: Annotated[
        bool,
        typer.Option("--accept-aborted", help="End with 0 although an env failed in more than 5 % of the episodes."),
    ] = False,
) -> None:
    """Play whole episodes with a trained policy, and print returns and lengths.

    Env, module and connectors are those of the run. Nothing that is played is trained on.
    """
    tasks: list[dict[str, Any] | None] = [_read_task(text) for text in task or ()] or [None]
    if watch:
        kinds = {"--task": task, "--render": render, "--explore": explore, "--json": as_json}
        kinds |= {"--episodes": episodes != _EPISODES, "--checkpoint": checkpoint != CheckpointChoice.NEWEST}
        if given := [option for option, value in kinds.items() if value]:
            raise ConfigError("is not for --watch; leave one of them out", key=given[0])
        _watch(asked, run, num_envs=num_envs, seed=seed)
        return
    from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
    from headrace.deploy.annexes.policies.evaluation import PlaySettings, in_words
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.deploy.trained.saved_policy import resolve_policy

    set_up_logging(Identity("", "evaluate"))
    video = EpisodeVideo(render, render_episodes) if render is not None else None
    policy = resolve_policy(run, asked, which=checkpoint.value)
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
        results = _play(policy, PlaySettings(episodes, num_envs, seed or 0, explore), video, tasks)
    if as_json:
        text = "\n".join(orjson.dumps(told).decode() for told in results)
    else:
        text = "\n".join(map(in_words, results)) + (f"\nvideo: {video.path}" if video is not None else "")
    say(text)
    if not results[-1]["complete"]:
        log.warning("stopped after %d of %d episodes", results[-1]["episodes"], episodes)
        raise typer.Exit(int(ExitCode.FAILURE))
    if (doubts := [why for told in results if (why := doubt_of(told))]) and not accept_aborted:
        log.error("%s; repair the env, or give --accept-aborted", doubts[0])
        raise typer.Exit(int(ExitCode.EPISODES_ABORTED))


def _read_task(text: str) -> dict[str, Any]:
    from headrace.schemas.chunks.task import check_values

    try:
        return check_values(orjson.loads(text))
    except (orjson.JSONDecodeError, EncodeError) as error:
        raise ConfigError(f"{text!r:.80} is no task as JSON: {error}", key="--task") from error


def _play(
    policy: ResolvedPolicy, settings: PlaySettings, video: EpisodeVideo | None, tasks: list[dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Play all episodes with each task. Return the results, fewer where a signal ends one before its last episode."""
    from headrace.deploy.annexes.policies.evaluation import Evaluation
    from headrace.schemas.basics.stop_event import stop_event
    from headrace.workers.fleet.user_side import envs_apart

    saved, results, began = policy.saved, list[dict[str, Any]](), time.monotonic()
    with (
        envs_apart() as calls,
        Evaluation(policy.config, settings, video, calls) as evaluation,
        stop_event() as stopping,
    ):
        for task in tasks:
            try:
                scores = evaluation.play(saved.arrays, saved.version, stopping, task)
            except (ModuleError, ConnectorError) as error:
                raise policy.build_error(error) from error
            told = {
                "source": saved.source,
                "weights": saved.version,
                "env": policy.config.sampling.env,
                "task": task,
                "explore": settings.explore,
                "seed": settings.seed,
                **scores.as_json(),
                "seconds": round(time.monotonic() - began, 3),
                "video": str(video.path) if video is not None else None,
            }
            results.append(told)
            began = time.monotonic()
            if not scores.complete:
                break
    return results


def _watch(asked: Asked, run: str, *, num_envs: int | None, seed: int | None) -> None:
    """Evaluate the run's checkpoints while it trains, until told to stop. Training comes first where cores are few."""
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.deploy.trained.saved_policy import settings_for
    from headrace.schemas.basics.stop_event import stop_event

    os.nice(_NICENESS)
    run_dir = Path(run)
    if not (is_there(run_dir) and run_dir.is_dir()):
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


@command(
    app,
    "headrace export runs/a --to policy.onnx",
    "headrace export runs/a --checkpoint best --to policy.pt",
    "headrace export runs/a --to policy.pt2 --module-id walker",
    "headrace export recording --to minari --out cartpole-v0",
    options="run to out fps checkpoint module_id env fleet_id config sets allow",
)
def export(
    asked: Asked,
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN_HELP} Or the folder of a recording.")],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            help="File: .pt (TorchScript), .pt2 (torch.export) or .onnx (extra onnx). Of a recording: minari, hf or "
            "lerobot (each an extra).",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to make of a recording.")] = None,
    fps: Annotated[int | None, typer.Option("--fps", min=1, help="Steps per second for lerobot; default 30.")] = None,
    checkpoint: Checkpoint = CheckpointChoice.NEWEST,
    module_id: Annotated[
        str | None, typer.Option("--module-id", help="Which one, where there are several policies.")
    ] = None,
) -> None:
    """Write a trained policy to a file, or a recording to a dataset, for other programs.

    The file of a policy, from observations to the best actions, is tried with random observations before it is kept. A
    dataset has all whole episodes.
    """
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.deploy.trained.saved_policy import build_policy, resolve_policy

    set_up_logging(Identity("", "export"))
    if out is not None or not to.suffix:
        say(part("export_recording")(run, str(to), out, module_id=module_id, fps=fps))
        return
    with no_exit_from(EnvError, "the env or the module"):
        found = resolve_policy(run, asked, which=checkpoint.value)
        policy = build_policy(replace(found, config=found.config.replaced({"sampling.device": "cpu"})))
        written = policy.export_file(to, module_id)
    say(f"{written.path}: {policy.source}\n{written.in_words()}")
