"""The command `headrace chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked

app = typer.Typer()


@command(
    app,
    "headrace chaos --minutes 3 --seed 7",
    "headrace chaos --minutes 10 --seed 7 --env my_package.envs:make_env --run-dir runs/chaos-7 --json",
    "headrace chaos --config cartpole --workers 4 --minutes 10",
    "headrace chaos --minutes 10 --seed 7 --print-plan > plan.json",
    "headrace chaos --plan plan.json",
    options="minutes seed plan print_plan env workers num_envs run_dir config sets as_json",
)
def chaos(
    asked: Asked,
    *,
    minutes: Annotated[float, typer.Option("--minutes", help="How long the faults go on.", min=0.1)] = 3.0,
    seed: Annotated[int, typer.Option("--seed", help="It, --workers and --minutes make the schedule.")] = 0,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="This schedule, JSON or TOML.")] = None,
    print_plan: Annotated[bool, typer.Option("--print-plan", help="Show the schedule, and start nothing.")] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="New folder for fleet, evidence and report; default: runs/chaos-TIME."),
    ] = None,
    as_json: bool,
) -> None:
    """Try a real fleet: kill, stop, cut and disturb it by a schedule, and check what it promises.

    Compares the books with two sources of its own: an env that writes a byte a step, and a learner that records what
    it gets. Exit code 20 when a promise was broken.
    """
    from headrace.deploy.annexes.chaos.chaos_command import chaos as run_chaos

    run_chaos(
        asked, minutes=minutes, seed=seed, plan_path=plan, print_plan=print_plan, run_dir=run_dir, as_json=as_json
    )
