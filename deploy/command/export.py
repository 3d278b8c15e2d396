"""`headrace export`: a trained policy as a file for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.deploy.fleet.roles import no_exit_from
from headrace.deploy.run.joining import Flags, Sets
from headrace.deploy.run.saved_policy import Which, build_policy, resolve_policy
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import ignore_closed_reader
from headrace.schemas.errors import EnvError


def export(
    config: Path | None,
    sets: Sets,
    flags: Flags,
    *,
    run: str,
    which: Which,
    to: Path,
    module_id: str | None,
    allow: Sequence[str] = (),
) -> None:
    """Write the policy to the file `to`, and print what is in it."""
    set_up_logging(Identity("", "export"))
    with no_exit_from(EnvError, "the env or the module"):
        policy = build_policy(resolve_policy(run, config, sets, flags, which=which, allow=allow))
        path = policy.export(to, module_id)
    with ignore_closed_reader(sys.stdout):
        print(f"{path}: {policy.source}", flush=True)  # noqa: T201
