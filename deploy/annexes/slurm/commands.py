"""`headrace slurm`: the command line for a fleet on a Slurm cluster; the modules beside it do the work."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import orjson
import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked, config_file
from headrace.deploy.run.several_brokers import check_one_broker
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.errors import ExitCode

app = typer.Typer(
    help="A fleet as jobs of a Slurm cluster: a head job, and arrays of workers and env hosts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _slurm() -> None:
    """Run a fleet on a Slurm cluster. The run directory must be on a file system that all its nodes share."""


@command(
    app,
    "headrace slurm up fleet.toml",
    "headrace slurm up fleet.toml --dry-run",
    "headrace slurm up cartpole --run-dir runs/a --set slurm.worker_tasks=8 --set slurm.workers_per_task=4",
    'headrace slurm up fleet.toml --set \'slurm.options=["--partition=cpu", "--time=1-00:00:00"]\'',
    options="config shared_run_dir dry_run sets as_json",
)
def up(
    asked: Asked,
    *,
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", callback=config_file, help="Settings, or the name of a recipe."),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the lines of sbatch, and do nothing.")] = False,
    as_json: bool,
) -> None:
    """Submit a fleet: its head job, and arrays of workers and env hosts, which start once the head has started.

    The jobs read the settings as they are now: later changes of the file do not reach them. Again with the run
    directory of a fleet that has ended, it goes on with that run.
    """
    from headrace.deploy.annexes.slurm import lifecycle

    resolved = replace(asked, config=config).settings
    check_one_broker(resolved, "headrace slurm")
    if dry_run:
        for line in lifecycle.dry_run(resolved):
            say(shlex.join(line))
        return
    where, jobs = lifecycle.up(resolved)
    if as_json:
        say(orjson.dumps({"run_dir": str(where), **jobs.model_dump()}).decode())
        return
    arrays = f"workers {jobs.workers}, env hosts {jobs.env_hosts}".replace("[]", "none").translate({91: None, 93: None})
    say(f"submitted: head {jobs.head}, {arrays}; run directory {where}")
    say(f"look at it with: headrace slurm status --run-dir {to_paste(where)}")


@command(
    app,
    "headrace slurm scale 16 --run-dir runs/a",
    "headrace slurm scale --run-dir runs/a   # top up",
    options="tasks run_dir",
)
def scale(
    asked: Asked,
    tasks: Annotated[
        int | None,
        typer.Argument(
            metavar="N", min=0, max=10_000, help="Worker tasks; without it, as many as were asked for last."
        ),
    ] = None,
) -> None:
    """Submit worker tasks, or stop the newest, until there are TASKS of them.

    Those that are stopped drain first. Exit code 7 when the fleet's head job has ended, 9 when Slurm does not answer.
    """
    from headrace.deploy.annexes.slurm import lifecycle

    there, wanted = lifecycle.scale(asked.run_dir().absolute(), tasks)
    say(f"worker tasks: {there} -> {wanted}" if there != wanted else f"worker tasks: {there}, as wanted")


@command(
    app,
    "headrace slurm status",
    "headrace slurm status --run-dir runs/a --json | python -m json.tool",
    options="run_dir as_json",
)
def status(asked: Asked, as_json: bool) -> None:
    """Show the fleet's jobs beside its own state, and what is wrong.

    Exit code 21 when something is wrong.
    """
    from headrace.deploy.annexes.slurm.overview import overview_of, table

    seen = overview_of(asked.run_dir().absolute())
    findings = list(seen.findings())
    if as_json:
        fleet = seen.fleet.model_dump(include={"fleet_id", "state", "env_steps", "best_return"}) if seen.fleet else None
        jobs = [asdict(task) for task in seen.tasks]
        facts = {"run_dir": str(seen.run_dir), "fleet": fleet, "jobs": jobs, "findings": findings}
        say(orjson.dumps(facts).decode())
    else:
        PrintableConsole().print(table(seen))
        for line in (seen.fleet_in_words(), *findings):
            say(line)
    raise typer.Exit(ExitCode.FINDINGS if findings else ExitCode.OK)


@command(app, "headrace slurm down", "headrace slurm down --run-dir runs/a", options="run_dir")
def down(asked: Asked) -> None:
    """Drain the fleet and end its jobs, workers first. Returns once their nodes are free.

    Jobs that do not drain in time are killed. What they had not delivered is counted then.
    """
    from headrace.deploy.annexes.slurm import lifecycle

    lifecycle.down(asked.run_dir().absolute(), lambda line: say(line, sys.stderr))
    say("its jobs have ended, and their nodes are free")


@command(app, "headrace slurm scripts", "ls $(headrace slurm scripts)")
def scripts() -> None:
    """Print the folder of the scripts that jobs run, and of top_up.sh."""
    from headrace.deploy.annexes.slurm.submission import SCRIPTS

    say(str(SCRIPTS))
