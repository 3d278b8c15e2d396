"""The commands about a trained policy: `evaluate` and `export`. `serve` is among the roles."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked

app = typer.Typer()


class CheckpointChoice(StrEnum):
    """The checkpoints of a run directory."""

    NEWEST = "newest"
    BEST = "best"


Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, a checkpoint file, or redis://HOST:PORT.")]
Checkpoint = Annotated[
    CheckpointChoice, typer.Option("--checkpoint", help="Of a run directory: the newest checkpoint, or the best one.")
]


@command(
    app,
    "headrace evaluate runs/a --episodes 100",
    "headrace evaluate runs/a --checkpoint best --render best.mp4",
    "headrace evaluate runs/a/best.checkpoint --seed 7 --json",
    "headrace evaluate redis://127.0.0.1:6379 --fleet-id demo --env CartPole-v1",
    "headrace evaluate runs/a --watch --set learner.evaluate_every_steps=20000",
    options="run episodes checkpoint num_envs seed explore render render_episodes watch env fleet_id config sets allow"
    " as_json",
)
def evaluate(
    asked: Asked,
    *,
    run: Run,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Whole episodes to play.")] = 100,
    checkpoint: Checkpoint = CheckpointChoice.NEWEST,
    num_envs: Annotated[
        int | None, typer.Option("--num-envs", min=1, help="Environments stepped together; default: as in training.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the episodes; default 0. A seed repeats its episodes.")
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
) -> None:
    """Play whole episodes with a trained policy, and print returns and lengths.

    Env, module and connectors are those of the run. Nothing that is played is trained on.
    """
    from headrace.deploy.annexes.policies.evaluate import evaluate as evaluate_policy
    from headrace.deploy.annexes.policies.evaluate import watch as watch_run

    if watch:
        watch_run(asked, run, num_envs=num_envs, seed=seed)
        return
    evaluate_policy(
        asked,
        run,
        which=checkpoint.value,
        episodes=episodes,
        num_envs=num_envs,
        seed=seed,
        explore=explore,
        render=render,
        render_episodes=render_episodes,
        as_json=as_json,
    )


@command(
    app,
    "headrace export runs/a --to policy.onnx",
    "headrace export runs/a --checkpoint best --to policy.pt",
    "headrace export runs/a --to policy.pt2 --module-id walker",
    options="run to checkpoint module_id env fleet_id config sets allow",
)
def export(
    asked: Asked,
    run: Run,
    to: Annotated[
        Path,
        typer.Option("--to", help="File: .pt (TorchScript), .pt2 (torch.export) or .onnx (extra onnx)."),
    ],
    checkpoint: Checkpoint = CheckpointChoice.NEWEST,
    module_id: Annotated[
        str | None, typer.Option("--module-id", help="Which one, where there are several policies.")
    ] = None,
) -> None:
    """Write a trained policy to a file for other programs: observations in, the best actions out.

    The file is tried with random observations before it is kept.
    """
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.deploy.terminal.logs import Identity, set_up_logging
    from headrace.deploy.terminal.std_streams import ignore_closed_reader
    from headrace.deploy.trained.saved_policy import build_policy, resolve_policy
    from headrace.schemas.errors import EnvError

    set_up_logging(Identity("", "export"))
    with no_exit_from(EnvError, "the env or the module"):
        policy = build_policy(resolve_policy(run, asked, which=checkpoint.value))
        written = policy.export_file(to, module_id)
    with ignore_closed_reader(sys.stdout):
        typer.echo(f"{written.path}: {policy.source}\n{written.in_words()}")
