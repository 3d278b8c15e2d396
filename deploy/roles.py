"""`headrace worker | broker | learner | env-host`: one role in this process, started by a person or the supervisor.

The roles' own modules are imported only here and only when needed: torch alone takes a second or two.
"""

from __future__ import annotations

import gc
import logging
import re
import secrets
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.deploy.fleet_file import read_addresses
from headrace.deploy.liveness_file import LivenessFile
from headrace.deploy.logs import Identity, set_up_logging
from headrace.deploy.options import chosen_run, describe_origin, resolve
from headrace.deploy.run_dir import RUNS, file_name_of
from headrace.schemas.config import FleetConfig
from headrace.schemas.errors import ConfigError, EnvError, HeadraceError, ModuleError, RunDirError
from headrace.schemas.keys import ENV_HOST, client_keys

log = logging.getLogger("headrace.deploy")

_SAYS_ENOUGH = (ImportError, AttributeError, HeadraceError)
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_HIGHEST_PORT = 65_535

Sets = Iterable[str] | None
Flags = Mapping[str, Any]


def run_start_check(config: Path | None) -> None:
    """Check what `config` names, in this process. It ends without the interpreter's clean-up, which envs can stop."""
    from headrace.deploy.check_process import STEP
    from headrace.deploy.start_check import check_start

    resolved, _ = resolve(config, None, {})

    def say(step: str) -> None:
        print(STEP + step, flush=True)  # noqa: T201

    with no_exit_from(EnvError, "the env or a module"):
        try:
            check_start(resolved, say)
        except HeadraceError as error:
            if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, _SAYS_ENOUGH):
                traceback.print_exception(error.__cause__)  # it is in the user's code
            raise


def start_worker(
    config: Path | None,
    sets: Sets,
    flags: Flags,
    *,
    endpoint: str | None,
    slot: int | None,
    incarnation: int,
) -> None:
    """Run a worker until it is told to stop."""
    resolved, origin = _resolve(config, sets, flags, endpoint)
    fleet_id, where = _place(resolved, endpoint, "worker")
    if not fleet_id:
        raise ConfigError("the fleet to join is unknown; give --fleet-id, or --run-dir of a fleet on this machine")
    recorders = _folder(Path(resolved.fleet.run_dir) / "recorders")
    set_up_logging(Identity(fleet_id, "worker", slot, incarnation or None))
    place = "any slot" if slot is None else f"slot {slot} incarnation {incarnation or 'new'}"
    log.info(
        "headrace %s worker, %s, of fleet %s at %s; config: %s", version("headrace"), place, fleet_id, where, origin
    )
    from headrace.workers.fleet.worker import run_worker

    # torch and other modules live as long as this process, so the garbage collector need not look through them
    gc.freeze()
    with no_exit_from(EnvError, "the env or the module"):
        run_worker(
            resolved, endpoint=where, fleet_id=fleet_id, slot=slot, incarnation=incarnation, recorder_dir=recorders
        )


def start_broker(config: Path | None, sets: Sets, flags: Flags, *, max_env_steps: int | None = None) -> None:
    """Run the broker until it is told to stop."""
    resolved, origin = _resolve(config, sets, flags)
    run_dir = _folder(Path(resolved.fleet.run_dir))
    fleet_id = resolved.fleet.fleet_id or f"fleet-{secrets.token_hex(4)}"
    set_up_logging(Identity(fleet_id, "broker"))
    log.info(
        "headrace %s broker of fleet %s on %s; config: %s", version("headrace"), fleet_id, resolved.broker.host, origin
    )
    from headrace.broker.process import run_broker

    url = resolved.redis.url or None
    run_broker(resolved, fleet_id=fleet_id, run_dir=run_dir, redis_url=url, max_env_steps=max_env_steps)


def start_learner(config: Path | None, sets: Sets, flags: Flags, *, endpoint: str | None) -> None:
    """Run the reference learner until it is told to stop."""
    resolved, origin = _resolve(config, sets, flags, endpoint)
    fleet_id, where = _place(resolved, endpoint, "learner")
    run_dir = _folder(Path(resolved.fleet.run_dir))
    set_up_logging(Identity(fleet_id, "learner"))
    log.info("headrace %s learner at %s; config: %s", version("headrace"), where, origin)
    from headrace.learner_stub.training import run_learner

    with no_exit_from(ModuleError, "the module"):
        run_learner(resolved, endpoint=where, run_dir=run_dir)


def start_env_host(config: Path | None, sets: Sets, flags: Flags, *, connect: str) -> None:
    """Lend envs to a worker until told to stop, or refused."""
    resolved, origins = resolve(config, sets, flags)
    origin = describe_origin(config, origins)
    _check_address(connect, "--connect")
    keys = client_keys(resolved.keys.dir or None, ENV_HOST)
    set_up_logging(Identity(resolved.fleet.fleet_id, ENV_HOST))
    sampling = resolved.sampling
    log.info(
        "headrace %s env-host, %d x %s for the worker at %s; config: %s",
        version("headrace"),
        sampling.num_envs,
        sampling.env,
        connect,
        origin,
    )
    from headrace.workers.agents.env_process import AGENTS_CHILD
    from headrace.workers.config import EnvRunnerConfig
    from headrace.workers.envs.remote.host.process import run_env_host

    settings = {**sampling.model_dump(), "env_placement": "process", "policies": None, "policy_mapping_fn": None}
    with no_exit_from(EnvError, "the env"):
        run_env_host(EnvRunnerConfig(**settings), connect, keys, LivenessFile.from_environment().touch, AGENTS_CHILD)


@contextmanager
def no_exit_from(error_type: type[HeadraceError], whose: str) -> Iterator[None]:
    """Turn sys.exit in user code into an error: its exit code would mean something else to us."""
    try:
        yield
    except SystemExit as error:
        raise error_type(f"{whose} called sys.exit({error.code!r}); it must raise an exception instead") from error


def _resolve(config: Path | None, sets: Sets, flags: Flags, endpoint: str | None = None) -> tuple[FleetConfig, str]:
    """Return the configuration: that of the fleet in the run directory, if there is one and no other file is named.

    Without a run directory it is the newest run. With an `endpoint` instead, the broker may be on another machine, and
    what this process keeps goes to a folder named after the fleet.
    """
    run_dir = flags.get("fleet.run_dir")
    if run_dir is None and not (asked := resolve(config, sets, flags)[0]).fleet.run_dir:
        elsewhere = RUNS / file_name_of(asked.fleet.fleet_id or endpoint or "")
        run_dir = str(chosen_run(asked) if endpoint is None else elsewhere)
        flags = {**flags, "fleet.run_dir": run_dir}
    if config is None and run_dir is not None and (Path(run_dir) / "config.json").exists():
        config = Path(run_dir) / "config.json"
    resolved, origins = resolve(config, sets, flags)
    return resolved, describe_origin(config, origins)


def _place(config: FleetConfig, endpoint: str | None, role: str) -> tuple[str, str]:
    """Return (fleet id, endpoint) as given, else as the run directory has them."""
    if endpoint is not None:
        _check_address(endpoint, "--endpoint")
        return config.fleet.fleet_id, endpoint
    fleet_id, endpoints = read_addresses(Path(config.fleet.run_dir))
    if role not in endpoints:
        raise RunDirError(
            config.fleet.run_dir, "no broker has served from it yet; start `headrace up`, or give --endpoint"
        )
    return config.fleet.fleet_id or fleet_id, endpoints[role]


def _check_address(address: str, option: str) -> None:
    matched = _ENDPOINT.fullmatch(address)
    if matched is None or not 0 < int(matched[1]) <= _HIGHEST_PORT:
        raise ConfigError(f"should be tcp://HOST:PORT, got {address!r:.80}", key=option)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(str(path), error.strerror or str(error)) from error
    return path
