"""The command `headrace serve`: a policy server from a checkpoint, without broker and learner."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.process.service_manager import service_manager
from headrace.deploy.run.options import Asked, chosen_run
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ConnectorError, EnvError, ModuleError

if TYPE_CHECKING:
    from headrace.deploy.trained.saved_policy import ResolvedPolicy

log = logging.getLogger("headrace.deploy")
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
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.deploy.trained.saved_policy import resolve_policy

    if checkpoint is None:
        checkpoint = str(chosen_run(asked.named("fleet.run_dir")))
    set_up_logging(Identity(str(asked.flags.get("fleet.fleet_id") or ""), "serve"))
    policy = resolve_policy(checkpoint, asked)
    with no_exit_from(EnvError, "the env or the module"):
        told = _serve(policy)
    say(orjson.dumps(told).decode() if as_json else _in_words(told))


def _serve(policy: ResolvedPolicy) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C; then let episodes end, and return their results."""
    from headrace.schemas.basics.stop_event import stop_event
    from headrace.workers.serving.standalone import StandaloneServer

    config, saved = policy.config, policy.saved
    try:
        server = StandaloneServer(config, saved.arrays, saved.version)
    except (ModuleError, ConnectorError) as error:
        raise policy.build_error(error) from error
    try:
        log.info(
            "headrace %s serves %s for %s, explore %s, at %s; config: %s",
            version("headrace"),
            saved.source,
            config.sampling.env,
            "on" if config.sampling.explore else "off",
            " and ".join(filter(None, (server.env.endpoint, server.env.url))),
            policy.origin,
        )
        with stop_event() as stopping:
            server.serve(stopping, service_manager().turn)
    finally:
        server.close()
    return {"source": saved.source, "weights": saved.version, **server.sums.as_json()}


def _in_words(told: dict[str, Any]) -> str:
    gone = f"; {told['aborted']} aborted" if told["aborted"] else ""
    agents = ", ".join(f"{agent} {mean:.2f}" for agent, mean in told.get("mean_return_by_agent", {}).items())
    each = f"; by agent {agents}" if agents else ""
    if not told["episodes"]:
        return f"no episode has ended{gone}"
    return (
        f"{told['episodes']:,} episodes, {told['steps']:,} steps: return {told['mean_return']:.2f} on average "
        f"({told['min_return']:g} to {told['max_return']:g}), length {told['mean_length']:.1f}{each}{gone}"
    )
