"""The commands about a trained policy: `export`. `serve` is among the roles."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.options import ConfigPath, Debug, Env, FleetId, Sets, examples

app = typer.Typer()


class CheckpointChoice(StrEnum):
    """The checkpoints of a run directory."""

    NEWEST = "newest"
    BEST = "best"


Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, a checkpoint file, or redis://HOST:PORT.")]
Checkpoint = Annotated[
    CheckpointChoice, typer.Option("--checkpoint", help="Of a run directory: the newest checkpoint, or the best one.")
]


@app.command(
    epilog=examples(
        "headrace export runs/default --to policy.onnx",
        "headrace export runs/default --checkpoint best --to policy.pt",
        "headrace export runs/default --to policy.pt2 --module-id walker",
    )
)
def export(
    run: Run,
    to: Annotated[
        Path,
        typer.Option("--to", help="File: .pt (TorchScript), .pt2 (torch.export) or .onnx (extra onnx)."),
    ],
    checkpoint: Checkpoint = CheckpointChoice.NEWEST,
    module_id: Annotated[
        str | None, typer.Option("--module-id", help="Which one, where there are several policies.")
    ] = None,
    env: Env = None,
    fleet_id: FleetId = None,
    config: ConfigPath = None,
    sets: Sets = None,
    debug: Debug = False,
) -> None:
    """Write a trained policy to a file for other programs: observations in, the best actions out.

    The file is tried with random observations before it is kept.
    """
    from headrace.deploy.export import export as export_policy

    flags = {"sampling.env": env, "fleet.fleet_id": fleet_id}
    export_policy(config, sets, flags, run=run, which=checkpoint.value, to=to, module_id=module_id, debug=debug)
