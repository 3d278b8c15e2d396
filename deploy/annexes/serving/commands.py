"""The command `headrace serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked

app = typer.Typer()


@command(
    app,
    "headrace serve --http 8080",
    "headrace serve --checkpoint runs/a --host 0.0.0.0 --port 5900 --set keys.dir=keys --json",
    "headrace serve --checkpoint runs/a/learner.checkpoint --set serving.lease_s=10 --http 8080",
    "headrace serve --checkpoint redis://127.0.0.1:6379 --fleet-id demo --env CartPole-v1 --explore",
    options="checkpoint http port host env open_episodes explore fleet_id config sets allow as_json",
)
def serve(
    asked: Asked,
    *,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="A run directory, a learner.checkpoint, or redis://HOST:PORT; default: the newest run in runs/.",
        ),
    ] = None,
    as_json: bool,
) -> None:
    """Serve a trained policy to clients.

    For evaluation and deployment tests: no broker, no learner. Episodes are counted, then dropped. SIGTERM drains.
    """
    from headrace.deploy.annexes.serving.serve import serve as serve_policy

    serve_policy(asked, checkpoint=checkpoint, as_json=as_json)
