"""How long each role may be silent before it counts as hung: for the supervisor, and for `headrace health`."""

from __future__ import annotations

from headrace.deploy.process.liveness_file import FIRST_SIGN_S
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S


def silence_limits(config: FleetConfig) -> dict[str, float]:
    """Return the seconds between two signs of life that a role may take, by the role's name."""
    return {
        "worker": config.broker.lease_s,
        "broker": config.broker.lease_s,
        "learner": config.supervisor.hung_after_s,
        # A host is silent while it closes its envs. Its worker may already count it as lost by then.
        "env-host": config.broker.lease_s + ENV_CLOSE_TIMEOUT_S,
    }


def first_sign_limits(config: FleetConfig) -> dict[str, float]:
    """Return the seconds that a new process may take until its first sign of life, by the role's name.

    An env host is not listed: until its first sign it builds an env, which has a deadline of its own.
    """
    return {
        "worker": max(FIRST_SIGN_S, config.worker.connect_timeout_s + 10.0),
        "broker": FIRST_SIGN_S,
        "learner": max(FIRST_SIGN_S, config.supervisor.hung_after_s),
    }
