"""`headrace slurm`: the command line for a fleet on a Slurm cluster; the modules beside it do the work."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from headrace.deploy.run.options import AsJson, Asked, RunDirPath, Sets, chosen_run, config_file, examples, text_of
from headrace.deploy.run.several_brokers import check_one_broker
from headrace.deploy.terminal.output import with_output_options
from headrace.deploy.terminal.std_streams import ignore_closed_reader
from headrace.schemas.basics.printable import printable
from headrace.schemas.errors import ExitCode

app = typer.Typer(
    help="A fleet as jobs of a Slurm cluster: a head job, and arrays of workers and env hosts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _slurm() -> None:
    """Run a fleet on a Slurm cluster. The run directory must be on a file system that all its nodes share."""


@app.command(
    epilog=examples(
        "headrace slurm up fleet.toml",
        "headrace slurm up fleet.toml --dry-run",
        "headrace slurm up cartpole --run-dir runs/a --set slurm.worker_tasks=8 --set slurm.workers_per_task=4",
        'headrace slurm up fleet.toml --set \'slurm.options=["--partition=cpu", "--time=1-00:00:00"]\'',
    )
)
@with_output_options
def up(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", callback=config_file, help="Settings, or the name of a recipe."),
    ],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run, shared by all nodes; default: runs/ENV-TIME.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the lines of sbatch, and do nothing.")] = False,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Submit a fleet: its head job, and arrays of workers and env hosts, which start once the head has started.

    The jobs read the settings as they are now: later changes of the file do not reach them. Again with the run
    directory of a fleet that has ended, it goes on with that run.
    """
    from headrace.deploy.slurm import lifecycle

    resolved, _ = Asked(config, sets, {"fleet.run_dir": text_of(run_dir)}).resolve()
    check_one_broker(resolved, "headrace slurm")
    if dry_run:
        for line in lifecycle.dry_run(resolved):
            typer.echo(shlex.join(line))
        return
    where, jobs = lifecycle.up(resolved)
    if as_json:
        typer.echo(orjson.dumps({"run_dir": str(where), **jobs.model_dump()}).decode())
        return
    arrays = f"workers {jobs.workers}, env hosts {jobs.env_hosts}".replace("[]", "none").translate({91: None, 93: None})
    typer.echo(f"submitted: head {jobs.head}, {arrays}; run directory {where}")
    typer.echo(f"look at it with: headrace slurm status --run-dir {where}")


@app.command(
    epilog=examples("headrace slurm scale 16 --run-dir runs/a", "headrace slurm scale --run-dir runs/a   # top up")
)
@with_output_options
def scale(
    tasks: Annotated[
        int | None,
        typer.Argument(
            metavar="N", min=0, max=10_000, help="Worker tasks; without it, as many as were asked for last."
        ),
    ] = None,
    run_dir: RunDirPath = None,
) -> None:
    """Submit worker tasks, or stop the newest, until there are TASKS of them.

    Those that are stopped drain first. Exit code 7 when the fleet's head job has ended, 9 when Slurm does not answer.
    """
    from headrace.deploy.slurm import lifecycle

    there, wanted = lifecycle.scale(_run(run_dir), tasks)
    typer.echo(f"worker tasks: {there} -> {wanted}" if there != wanted else f"worker tasks: {there}, as wanted")


@app.command(
    epilog=examples("headrace slurm status", "headrace slurm status --run-dir runs/a --json | python -m json.tool")
)
@with_output_options
def status(run_dir: RunDirPath = None, as_json: AsJson = False) -> None:
    """Show the fleet's jobs beside its own state, and what is wrong.

    Exit code 21 when something is wrong.
    """
    from headrace.deploy.slurm.overview import overview_of, table

    seen = overview_of(_run(run_dir))
    findings = list(seen.findings())
    if as_json:
        fleet = seen.fleet.model_dump(include={"fleet_id", "state", "env_steps", "best_return"}) if seen.fleet else None
        jobs = [asdict(task) for task in seen.tasks]
        facts = {"run_dir": str(seen.run_dir), "fleet": fleet, "jobs": jobs, "findings": findings}
        typer.echo(orjson.dumps(facts).decode())
    else:
        Console().print(table(seen))
        for line in (seen.fleet_in_words(), *findings):
            typer.echo(printable(line))
    raise typer.Exit(ExitCode.FINDINGS if findings else ExitCode.OK)


@app.command(epilog=examples("headrace slurm down", "headrace slurm down --run-dir runs/a"))
@with_output_options
def down(run_dir: RunDirPath = None) -> None:
    """Drain the fleet and end its jobs, workers first. Returns once their nodes are free.

    Jobs that do not drain in time are killed. What they had not delivered is counted then.
    """
    from headrace.deploy.slurm import lifecycle

    lifecycle.down(_run(run_dir), _say)
    typer.echo("its jobs have ended, and their nodes are free")


@app.command(epilog=examples("headrace slurm scripts", "ls $(headrace slurm scripts)"))
@with_output_options
def scripts() -> None:
    """Print the folder of the scripts that jobs run, and of top_up.sh."""
    from headrace.deploy.slurm.submission import SCRIPTS

    typer.echo(SCRIPTS)


def _run(run_dir: Path | None) -> Path:
    resolved, _ = Asked(flags={"fleet.run_dir": text_of(run_dir)}).resolve()
    return chosen_run(resolved).absolute()


def _say(line: str) -> None:
    with ignore_closed_reader(sys.stderr):
        print(printable(line), file=sys.stderr, flush=True)  # noqa: T201
