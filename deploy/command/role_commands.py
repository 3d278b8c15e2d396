"""The commands that run one process of a fleet each. The supervisor starts them, and people on other machines do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked
from headrace.schemas.basics.bounds import MOST_LIVES
from headrace.schemas.errors import ConfigError

app = typer.Typer()


@command(app, hidden=True)
def check_start(config: Path | None) -> None:
    """Build what a config names, once; `headrace up` runs it before it starts anything."""
    from headrace.deploy.fleet.roles import run_start_check

    run_start_check(config)


@command(
    app,
    "headrace worker",
    "headrace worker --run-dir runs/a --num-envs 16",
    "headrace worker --endpoint tcp://BROKER:5701 --fleet-id demo --env CartPole-v1 --set keys.dir=keys",
    "headrace worker --rendezvous /shared/runs/a/rendezvous.json --set keys.dir=keys",
    "headrace worker --rendezvous /shared/runs/a/rendezvous.json --count 16 --scratch-dir /tmp/headrace",
    "headrace worker --rendezvous dns://broker --set broker.host=0.0.0.0 --set broker.port=5700 --set keys.dir=keys",
    options="env num_envs seed endpoint rendezvous fleet_id slot incarnation count scratch_dir run_dir config sets"
    " allow",
)
def worker(
    asked: Asked,
    *,
    endpoint: str | None,
    slot: Annotated[
        int | None,
        typer.Option("--slot", min=0, max=MOST_LIVES, help="Slot in the fleet; default: the broker gives one."),
    ] = None,
    incarnation: Annotated[
        int,
        typer.Option("--incarnation", min=0, max=MOST_LIVES, help="Incarnation in that slot; 0 asks for a new one."),
    ] = 0,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, max=1000, help="Keep so many workers alive here, until SIGTERM drains them."),
    ] = None,
    scratch_dir: Annotated[
        Path | None, typer.Option("--scratch-dir", help="With --count: folder of this machine for recorders and logs.")
    ] = None,
) -> None:
    """Run one sampler worker.

    It joins a fleet by its run directory, by its rendezvous, or by its broker's address.
    """
    from headrace.deploy.fleet.roles import start_worker

    _check_one_place("--endpoint", endpoint, asked)
    if count is not None and (slot is not None or incarnation):
        raise ConfigError("the broker gives slots to a group: leave out --slot and --incarnation", key="--count")
    start_worker(asked, endpoint=endpoint, slot=slot, incarnation=incarnation, count=count, scratch_dir=scratch_dir)


@command(
    app,
    "headrace broker --fleet-id demo --run-dir runs/b --redis-url redis://127.0.0.1:6379",
    "headrace broker --fleet-id demo --run-dir runs/c --set broker.host=0.0.0.0 --set keys.dir=keys",
    options="fleet_id redis_url max_env_steps run_dir config sets",
)
def broker(
    asked: Asked,
    max_env_steps: Annotated[
        int | None,
        typer.Option("--max-env-steps", min=1, max=2**63 - 1, help="Workers pause after this many, of all runs."),
    ] = None,
) -> None:
    """Run the broker alone.

    It publishes its addresses in RUN_DIR/rendezvous.json, or as fleet.rendezvous says. Without --redis-url it reports
    to no Redis.
    """
    from headrace.deploy.fleet.roles import start_broker

    start_broker(asked, max_env_steps=max_env_steps)


@command(
    app,
    "headrace learner",
    "headrace learner --endpoint ipc:///srv/runs/b/ipc/learner --run-dir runs/b --set learner.learning_rate=0.0003",
    "headrace learner --rendezvous /shared/runs/a/rendezvous.json",
    options="endpoint rendezvous fleet_id run_dir config sets allow",
)
def learner(asked: Asked, endpoint: str | None) -> None:
    """Run the reference PPO learner.

    It resumes from its checkpoint in RUN_DIR.
    """
    from headrace.deploy.fleet.roles import start_learner

    _check_one_place("--endpoint", endpoint, asked)
    start_learner(asked, endpoint=endpoint)


@command(
    app,
    "headrace env-host --run-dir runs/a --slot 1",
    "headrace env-host --connect ipc:///srv/runs/a/ipc/envs-1 --env CartPole-v1 --num-envs 4   # the worker of slot 1",
    "headrace env-host --connect tcp://WORKER:5800 --env CartPole-v1 --set keys.dir=keys",
    "headrace env-host --connect tcp://WORKER:5800 --num-envs 8 --set sampling.envs_per_process=1",
    "headrace env-host --rendezvous /shared/runs/a/rendezvous.json --env CartPole-v1   # any worker that needs it",
    options="connect rendezvous env lent_envs slot run_dir config sets allow",
)
def env_host(
    asked: Asked,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            help="tcp://HOST:PORT of the worker, or ipc:///PATH; `fleet.json` and the worker's log have it.",
        ),
    ] = None,
    slot: Annotated[
        int | None,
        typer.Option(
            "--slot",
            min=0,
            max=MOST_LIVES,
            help="Slot of the worker; default: with --rendezvous any that needs hosts, else 0.",
        ),
    ] = None,
) -> None:
    """Lend envs of this machine to a worker of a run here, or to one elsewhere.

    With --rendezvous it goes to a worker that waits for env hosts, and follows it.
    The worker has sampling.env_placement = "remote". Hosts may come and go at any time; each starts fresh envs.
    """
    from headrace.deploy.fleet.roles import start_env_host

    _check_one_place("--connect", connect, asked)
    start_env_host(asked, connect=connect, slot=slot)


def _check_one_place(option: str, address: str | None, asked: Asked) -> None:
    if address is not None and asked.flags["fleet.rendezvous"] is not None:
        raise ConfigError(f"give either {option} or --rendezvous", key="--rendezvous")
