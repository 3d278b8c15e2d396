"""`headrace serve`: a policy server from a checkpoint, without broker and learner."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.logs import Identity, set_up_logging
from headrace.deploy.options import describe_origin, resolve
from headrace.deploy.roles import Flags, Sets, no_exit_from
from headrace.deploy.saved_policy import SavedPolicy, config_beside, find_policy
from headrace.deploy.std_streams import ignore_closed_reader
from headrace.schemas.config import FleetConfig
from headrace.schemas.errors import ConfigError, ConnectorError, EnvError, ModuleError
from headrace.schemas.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.stop_event import stop_event

log = logging.getLogger("headrace.deploy")


def serve(config: Path | None, sets: Sets, flags: Flags, *, checkpoint: str, as_json: bool) -> None:
    """Serve the policy at `checkpoint` until SIGTERM or Ctrl-C; then let episodes end, and print their results.

    Settings are those beside the checkpoint, unless another file is named.
    """
    config = config or config_beside(checkpoint)
    resolved, origins = resolve(config, sets, flags)
    set_up_logging(Identity(resolved.fleet.fleet_id, "serve"))
    policy = find_policy(checkpoint, resolved.fleet.fleet_id)
    _check_policies(policy, resolved)
    with no_exit_from(EnvError, "the env or the module"):
        told = _serve(resolved, policy, describe_origin(config, origins))
    with ignore_closed_reader(sys.stdout):
        print(orjson.dumps(told).decode() if as_json else _in_words(told), flush=True)  # noqa: T201


def _check_policies(policy: SavedPolicy, config: FleetConfig) -> None:
    """Raise `ConfigError` where the settings do not name a policy that is there."""
    named = sorted(config.sampling.policies or [DEFAULT_MODULE_ID])
    if not set(policy.modules) <= set(named):
        raise ConfigError(
            f"{policy.source} has {_policies(policy.modules)}, and the settings name {_policies(named)}; give those "
            "it was trained with, by --config or --set",
            key="sampling.policies",
        )
    if frozen := sorted(set(named) - set(policy.modules)):
        log.warning("%s has no weights of %s: they act as they are built", policy.source, _policies(frozen))


def _policies(ids: list[str]) -> str:
    return "one policy without a name" if ids == [DEFAULT_MODULE_ID] else f"the policies {ids!r:.300}"


def _serve(config: FleetConfig, policy: SavedPolicy, origin: str) -> dict[str, Any]:
    from headrace.workers.serving.standalone import StandaloneServer

    try:
        server = StandaloneServer(config, policy.arrays, policy.version)
    except (ModuleError, ConnectorError) as error:
        raise ModuleError(
            f"{policy.source} is of another policy than {config.module.build} for {config.sampling.env} ({error}); "
            "name its env and module with --env and --set module.build=..., or its fleet.toml with --config"
        ) from error
    try:
        log.info(
            "headrace %s serves %s for %s, explore %s, at %s; config: %s",
            version("headrace"),
            policy.source,
            config.sampling.env,
            "on" if config.sampling.explore else "off",
            " and ".join(filter(None, (server.env.endpoint, server.env.url))),
            origin,
        )
        with stop_event() as stopping:
            server.serve(stopping)
    finally:
        server.close()
    return {"source": policy.source, "weights": policy.version, **server.sums.as_json()}


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
