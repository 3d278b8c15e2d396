"""`headrace ray`: the command line for workers on a Ray cluster; the modules beside it do the work."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.deploy.command.option_table import command, examples
from headrace.deploy.run.options import Asked
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.settings.config import MOST_WORKERS_ON_RAY

app = typer.Typer(help="Workers on a Ray cluster (extra ray).", no_args_is_help=True, rich_markup_mode=None)

Address = Annotated[
    str | None, typer.Option("--address", help="HOST:PORT of the cluster's head; default: ray.address, auto.")
]


@app.callback()
def _ray() -> None:
    """Run the workers of a fleet on a Ray cluster."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples(
        "headrace ray up --workers 8 --env CartPole-v1 --num-envs 8 --until-return 475 --run-dir runs/a",
        "headrace ray up --workers 8 --config cartpole --set broker.host=0.0.0.0 --set keys.dir=keys",
        "ray job submit --working-dir . -- headrace ray up --workers 8 --config cartpole",
    ),
)
def up(
    context: typer.Context,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=MOST_WORKERS_ON_RAY, help="Workers on Ray; default: ray.workers."),
    ] = None,
    address: Address = None,
) -> None:
    """Run a whole fleet, with its workers on a Ray cluster.

    Takes every option of `headrace up`. Broker, learner, Redis and dashboard run here; when this command ends, however
    it ends, so do the workers.
    """
    chosen = [f"ray.workers={workers}"] if workers is not None else []
    chosen += [f"ray.address={address}"] if address is not None else []
    sets = [word for text in chosen for word in ("--set", text)]
    command = context.find_root().command
    command.main(["up", "--workers", "0", *context.args, *sets], prog_name="headrace")


@command(
    app,
    "headrace ray workers --count 4 --run-dir runs/a",
    "headrace ray workers --count 8 --rendezvous /shared/runs/a/rendezvous.json --set keys.dir=keys",
    "headrace ray workers --count 8 --endpoint tcp://BROKER:5701 --fleet-id demo --set keys.dir=keys",
    options="count address env num_envs seed endpoint rendezvous fleet_id run_dir config sets allow",
)
def workers(
    asked: Asked,
    *,
    count: Annotated[
        int | None,
        typer.Option("--count", min=0, max=MOST_WORKERS_ON_RAY, help="Workers; default: as `headrace ray scale` says."),
    ] = None,
    address: Address = None,
    endpoint: str | None,
) -> None:
    """Lend a running fleet workers on a Ray cluster, until Ctrl-C; then they drain."""
    from headrace.deploy.annexes.ray.start import run_workers

    run_workers(asked.with_flags({"ray.address": address}), endpoint=endpoint, count=count)


@command(app, "headrace ray scale 16", "headrace ray scale 4 --run-dir runs/a", options="count run_dir")
def scale(
    asked: Asked,
    count: Annotated[int, typer.Argument(metavar="COUNT", min=0, max=MOST_WORKERS_ON_RAY, help="Workers on Ray.")],
) -> None:
    """Have COUNT workers on Ray from now on, in a run that `headrace ray up` started. Those too many drain."""
    from headrace.deploy.annexes.ray.wanted_workers import scale_run

    before = scale_run(asked.run_dir(), count)
    say(f"{count} workers on Ray, {before} before")
