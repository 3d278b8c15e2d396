"""The command `headrace doctor`."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import orjson
import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked
from headrace.deploy.terminal.std_streams import say

app = typer.Typer()


class JoiningRole(StrEnum):
    """A role that joins a fleet on another machine."""

    WORKER = "worker"
    LEARNER = "learner"
    ENV_HOST = "env-host"


@command(
    app,
    "headrace doctor",
    "headrace doctor --set fleet.workers=16 --json",
    "headrace doctor --endpoint tcp://BROKER:5701 --set keys.dir=keys   # on a worker's machine",
    "headrace doctor --rendezvous /shared/runs/a/rendezvous.json --set keys.dir=keys",
    "headrace doctor --rendezvous /shared/runs/a/rendezvous.json --role env-host --set keys.dir=keys",
    options="endpoint rendezvous role run_dir config redis_url sets as_json",
)
def doctor(
    asked: Asked,
    *,
    endpoint: str | None,
    rendezvous: str | None,
    role: Annotated[
        JoiningRole, typer.Option("--role", help="The role that is to run here, with --endpoint or --rendezvous.")
    ] = JoiningRole.WORKER,
    as_json: bool,
) -> None:
    """Check whether this machine can run a fleet, or a role of one elsewhere, by --endpoint or --rendezvous.

    Exit code 1 when it cannot. Starts nothing and leaves nothing behind.
    """
    from headrace.deploy.annexes.doctor.check import Verdict
    from headrace.deploy.annexes.doctor.examination import examine

    checks = list(examine(asked.settings, endpoint, rendezvous, role))
    fit = all(check.verdict is not Verdict.FAIL for check in checks)
    if as_json:
        say(orjson.dumps({"fit": fit, "checks": [asdict(check) for check in checks]}).decode())
    else:
        for check in checks:
            advice = f"; {check.advice}" if check.advice else ""
            say(f"{check.verdict:<5} {check.name:<14} {check.seen}{advice}")
        say(f"\nThis machine {'can run a fleet.' if fit else 'cannot run a fleet: repair what failed.'}")
    raise typer.Exit(0 if fit else 1)
