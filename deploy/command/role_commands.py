"""The commands that run one process of a fleet each. The supervisor starts them, and people on other machines do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.run.options import (
    Allow,
    AsJson,
    Asked,
    ConfigPath,
    Endpoint,
    Env,
    FleetId,
    NumEnvs,
    RedisUrl,
    RendezvousPlace,
    RunDirPath,
    Seed,
    Sets,
    examples,
    text_of,
)
from headrace.deploy.terminal.output import with_output_options
from headrace.schemas.basics.bounds import MOST_LIVES
from headrace.schemas.errors import ConfigError

app = typer.Typer()


@app.command(hidden=True)
@with_output_options
def check_start(config: ConfigPath = None) -> None:
    """Build what a config names, once; `headrace up` runs it before it starts anything."""
    from headrace.deploy.fleet.roles import run_start_check

    run_start_check(config)


@app.command(
    epilog=examples(
        "headrace worker",
        "headrace worker --run-dir runs/a --num-envs 16",
        "headrace worker --endpoint tcp://127.0.0.1:5701 --fleet-id demo --env CartPole-v1 --num-envs 16",
        "headrace worker --rendezvous /shared/runs/a/rendezvous.json --set keys.dir=keys",
        "headrace worker --rendezvous /shared/runs/a/rendezvous.json --count 16 --scratch-dir /tmp/headrace",
        "headrace worker --rendezvous dns://broker --env CartPole-v1 --set broker.worker_port=5701 --set keys.dir=keys",
    )
)
@with_output_options
def worker(
    env: Env = None,
    num_envs: NumEnvs = None,
    seed: Seed = None,
    endpoint: Endpoint = None,
    rendezvous: RendezvousPlace = None,
    fleet_id: FleetId = None,
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
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Run one sampler worker.

    It joins a fleet by its run directory, by its rendezvous, or by its broker's address.
    """
    from headrace.deploy.fleet.roles import start_worker

    _check_one_place(endpoint, rendezvous)
    flags = {
        "sampling.env": env,
        "sampling.num_envs": num_envs,
        "sampling.seed": seed,
        "fleet.fleet_id": fleet_id,
        "fleet.run_dir": text_of(run_dir),
        "fleet.rendezvous": rendezvous,
        "fleet.scratch_dir": text_of(scratch_dir),
    }
    if count is not None and (slot is not None or incarnation):
        raise ConfigError("the broker gives slots to a group: leave out --slot and --incarnation", key="--count")
    asked = Asked(config, sets, flags, allow or ())
    start_worker(asked, endpoint=endpoint, slot=slot, incarnation=incarnation, count=count)


@app.command(
    epilog=examples(
        "headrace broker --fleet-id demo --run-dir runs/b --set broker.worker_port=5701 --set broker.learner_port=5702",
        "headrace broker --fleet-id demo --run-dir runs/b --redis-url redis://127.0.0.1:6379",
    )
)
@with_output_options
def broker(
    fleet_id: FleetId = None,
    redis_url: RedisUrl = None,
    max_env_steps: Annotated[
        int | None,
        typer.Option("--max-env-steps", min=1, max=2**63 - 1, help="Workers pause after this many, of all runs."),
    ] = None,
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
    sets: Sets = None,
) -> None:
    """Run the broker alone.

    It publishes its addresses in RUN_DIR/rendezvous.json, or as fleet.rendezvous says. Without --redis-url it reports
    to no Redis.
    """
    from headrace.deploy.fleet.roles import start_broker

    flags = {"fleet.fleet_id": fleet_id, "redis.url": redis_url, "fleet.run_dir": text_of(run_dir)}
    start_broker(Asked(config, sets, flags), max_env_steps=max_env_steps)


@app.command(
    epilog=examples(
        "headrace learner",
        "headrace learner --endpoint tcp://127.0.0.1:5702 --run-dir runs/b --set learner.learning_rate=0.0003",
        "headrace learner --rendezvous /shared/runs/a/rendezvous.json",
    )
)
@with_output_options
def learner(
    endpoint: Endpoint = None,
    rendezvous: RendezvousPlace = None,
    fleet_id: FleetId = None,
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Run the reference PPO learner.

    It resumes from its checkpoint in RUN_DIR.
    """
    from headrace.deploy.fleet.roles import start_learner

    _check_one_place(endpoint, rendezvous)
    flags = {"fleet.fleet_id": fleet_id, "fleet.run_dir": text_of(run_dir), "fleet.rendezvous": rendezvous}
    start_learner(Asked(config, sets, flags, allow or ()), endpoint=endpoint)


@app.command(
    epilog=examples(
        "headrace env-host --run-dir runs/a --slot 1",
        "headrace env-host --connect tcp://127.0.0.1:5800 --env CartPole-v1 --num-envs 4",
        "headrace env-host --connect tcp://127.0.0.1:5801 --env CartPole-v1   # the worker of slot 1",
        "headrace env-host --connect tcp://WORKER:5800 --env CartPole-v1 --set keys.dir=keys",
        "headrace env-host --connect tcp://WORKER:5800 --num-envs 8 --set sampling.envs_per_process=1",
        "headrace env-host --rendezvous /shared/runs/a/rendezvous.json --env CartPole-v1   # any worker that needs it",
    )
)
@with_output_options
def env_host(
    connect: Annotated[
        str | None,
        typer.Option("--connect", help="tcp://HOST:PORT of the worker: sampling.env_hosts_port + its slot."),
    ] = None,
    rendezvous: RendezvousPlace = None,
    env: Env = None,
    num_envs: Annotated[int | None, typer.Option("--num-envs", help="Environments to lend, at most.")] = None,
    slot: Annotated[
        int | None,
        typer.Option(
            "--slot",
            min=0,
            max=MOST_LIVES,
            help="Slot of the worker; default: with --rendezvous any that needs hosts, else 0.",
        ),
    ] = None,
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Lend envs of this machine to a worker of a run here, or to one elsewhere.

    With --rendezvous it goes to a worker that waits for env hosts, and follows it.
    The worker has sampling.env_placement = "remote". Hosts may come and go at any time; each starts fresh envs.
    """
    from headrace.deploy.fleet.roles import start_env_host

    if connect is not None and rendezvous is not None:
        raise ConfigError("give either --connect or --rendezvous", key="--rendezvous")
    flags = {
        "sampling.env": env,
        "sampling.num_envs": num_envs,
        "fleet.run_dir": text_of(run_dir),
        "fleet.rendezvous": rendezvous,
    }
    start_env_host(Asked(config, sets, flags, allow or ()), connect=connect, slot=slot)


@app.command(
    epilog=examples(
        "headrace serve --http 8080",
        "headrace serve --checkpoint runs/a --port 5900 --num-envs 64 --json",
        "headrace serve --checkpoint runs/a/learner.checkpoint --set serving.lease_s=10 --http 8080",
        "headrace serve --checkpoint redis://127.0.0.1:6379 --fleet-id demo --env CartPole-v1 --explore",
    )
)
@with_output_options
def serve(
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="A run directory, a learner.checkpoint, or redis://HOST:PORT; default: the newest run in runs/.",
        ),
    ] = None,
    http: Annotated[
        int | None, typer.Option("--http", help="Port for HTTP; 0: a free one. Without it, no HTTP.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port for ZeroMQ; default: as configured, or a free one.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to bind; off loopback needs keys.")] = None,
    env: Env = None,
    num_envs: Annotated[int | None, typer.Option("--num-envs", help="Episodes that may be open at once.")] = None,
    explore: Annotated[bool, typer.Option("--explore/--no-explore", help="Sample actions, or take the best.")] = False,
    fleet_id: FleetId = None,
    config: ConfigPath = None,
    sets: Sets = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Serve a trained policy to clients.

    For evaluation and deployment tests: no broker, no learner. Episodes are counted, then dropped. SIGTERM drains.
    """
    from headrace.deploy.fleet.serve import serve as serve_policy

    flags = {
        "sampling.env": env,
        "sampling.num_envs": num_envs,
        "sampling.explore": explore,
        "serving.http_port": http,
        "serving.port": port,
        "serving.host": host,
        "fleet.fleet_id": fleet_id,
    }
    serve_policy(Asked(config, sets, flags, allow), checkpoint=checkpoint, as_json=as_json)


def _check_one_place(endpoint: str | None, rendezvous: str | None) -> None:
    if endpoint is not None and rendezvous is not None:
        raise ConfigError("give either --endpoint or --rendezvous", key="--rendezvous")
