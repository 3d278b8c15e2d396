"""`headrace worker | broker | learner | env-host`: one role in this process, started by a person or the supervisor.

The roles' own modules are imported only here and only when needed: torch alone takes a second or two.
"""

from __future__ import annotations

import gc
import logging
import math
import secrets
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from headrace.broker.files.state_file import read_broker_file
from headrace.deploy.fleet.watchdog import silence_limits
from headrace.deploy.process.liveness_file import FIRST_SIGN_S, LivenessFile
from headrace.deploy.run.annexes import part
from headrace.deploy.run.health import HealthFile
from headrace.deploy.run.joining import (
    Joined,
    await_place,
    check_published,
    env_host_keys,
    has_several_brokers,
    in_run,
    join,
    join_worker,
)
from headrace.deploy.run.options import Asked, chosen_run
from headrace.deploy.run.several_brokers import at_broker, whole_run_dir
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.basics.run_files import RENDEZVOUS_FILE, rendezvous_path
from headrace.schemas.basics.stop_event import StoppedError
from headrace.schemas.credentials.keys import ENV_HOST
from headrace.schemas.errors import (
    ConfigError,
    EnvError,
    HeadraceError,
    ModuleError,
    UnknownEnvError,
    no_fleet_error,
    writing,
)
from headrace.schemas.peers.fleet_address import AddressSource, FirstOf, RunDirAddresses
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.rendezvous import Rendezvous
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.deploy")

_SAYS_ENOUGH = (ImportError, AttributeError, HeadraceError)


def run_start_check(config: Path | None) -> None:
    """Check what `config` names, in this process."""
    from headrace.deploy.fleet.check_process import NOTE, STEP

    resolved = Asked(config).settings

    def say(step: str) -> None:
        print(STEP + step, flush=True)  # noqa: T201

    with no_exit_from(EnvError, "the env or a module"):
        try:
            if note := part("check_start")(resolved, say):
                print(NOTE + note, flush=True)  # noqa: T201
        except HeadraceError as error:
            own_words = isinstance(error, UnknownEnvError) or isinstance(error.__cause__, _SAYS_ENOUGH)
            if isinstance(error.__cause__, Exception) and not own_words:
                traceback.print_exception(error.__cause__)  # the cause is in the user's code
            raise


def start_worker(
    asked: Asked,
    *,
    endpoint: str | None,
    slot: int | None,
    incarnation: int,
    count: int | None = None,
    scratch_dir: Path | None = None,
) -> None:
    """Run a worker until it is told to stop, or a group of `count` workers.

    The group has recorders and logs in `scratch_dir` while it lives; None: in the run directory.
    """
    if count is not None:
        _start_group(asked, endpoint, count, scratch_dir)
        return
    joined = join_to_work(asked, endpoint, slot)
    if joined is None:
        return
    config, fleet_id, where = joined.config, joined.fleet_id, joined.endpoint
    recorders = _folder(Path(config.fleet.run_dir) / "recorders")
    set_up_logging(Identity(fleet_id, "worker", slot, incarnation or None))
    place = "any slot" if slot is None else f"slot {slot} incarnation {incarnation or 'new'}"
    told = version("headrace"), place, fleet_id, where, joined.origin
    log.info("headrace %s worker, %s, of fleet %s at %s; config: %s", *told)
    from headrace.workers.fleet.memory import keep_large_arrays
    from headrace.workers.fleet.worker import run_worker

    patience_s, end = config.worker.connect_timeout_s, None
    if incarnation:  # `up` has started it, and brings the broker back at the same address
        patience_s = math.inf
        end = Rendezvous(str(rendezvous_path(config.fleet.rendezvous, Path(config.fleet.run_dir))))
    health = _health_file(config, "worker")
    # torch and other modules live as long as this process, so the garbage collector need not scan them
    gc.freeze()
    keep_large_arrays()
    with no_exit_from(EnvError, "the env or the module"), health:
        run_worker(
            config,
            endpoint=where,
            fleet_id=fleet_id,
            slot=slot,
            incarnation=incarnation,
            recorder_dir=recorders,
            place=FleetPlace(where, "worker", joined.source, patience_s=patience_s, end=end),
        )


def _start_group(asked: Asked, endpoint: str | None, count: int, scratch_dir: Path | None) -> None:
    """Run a group of workers. They find the fleet as the group does: by a fixed address, or by a rendezvous."""
    from headrace.deploy.fleet.worker_group import run_group
    from headrace.deploy.process.child_environment import child_environment
    from headrace.deploy.process.fork_server import early_or_new

    joined = join_to_work(asked, endpoint)  # a fork server that was started early imports torch meanwhile
    if joined is None:
        return
    with early_or_new(child_environment(joined.config.sampling.torch_threads)) as fork_server:
        set_up_logging(Identity(joined.fleet_id, "supervisor"))
        part("warn_of_limits")(joined.config, "worker", count)
        if isinstance(joined.source, Rendezvous):
            options = ["--rendezvous", joined.source.where]
        elif isinstance(joined.source, RunDirAddresses) and (joined.source.path / RENDEZVOUS_FILE).exists():
            options = ["--rendezvous", str(joined.source.path / RENDEZVOUS_FILE)]
        else:
            options = ["--endpoint", joined.endpoint, "--fleet-id", joined.fleet_id]
        run_group(joined, options, count, fork_server, scratch_dir)


def join_to_work(asked: Asked, endpoint: str | None, slot: int | None = None) -> Joined | None:
    """Find the fleet as `join` does. Raises `ConfigError` if the fleet's name stays unknown."""
    joined = join(asked, endpoint, "worker", slot)
    if joined is not None and not joined.fleet_id:
        raise ConfigError("the fleet to join is unknown; give --fleet-id, or --run-dir of a fleet on this machine")
    return joined


def start_broker(asked: Asked, *, max_env_steps: int | None = None) -> None:
    """Run the broker until it is told to stop."""
    share = None
    if has_several_brokers(asked):
        section = asked.settings.broker
        if section.index is None:
            detail = f"should say which of the {section.count} brokers this one is, from 0 on"
            raise ConfigError(detail, key="broker.index")
        share = at_broker(asked.settings, section.index).model_copy(update={"broker": section})
    config, origin = in_run(asked, chosen_run(share.fleet.run_dir if share else asked.named("fleet.run_dir")), share)
    run_dir = _folder(Path(config.fleet.run_dir))
    before = read_broker_file(run_dir)
    fleet_id = config.fleet.fleet_id or (before.fleet_id if before else f"fleet-{secrets.token_hex(4)}")
    set_up_logging(Identity(fleet_id, "broker"))
    where = config.broker.host or "Unix sockets"
    log.info("headrace %s broker of fleet %s on %s; config: %s", version("headrace"), fleet_id, where, origin)
    from headrace.broker.process import run_broker

    with _health_file(config, "broker") as health:
        run_broker(
            config,
            fleet_id=fleet_id,
            run_dir=run_dir,
            redis_url=config.redis.url or None,
            max_env_steps=max_env_steps,
            alive=health.alive,
        )


def start_learner(asked: Asked, *, endpoint: str | None) -> None:
    """Run the reference learner until it is told to stop."""
    if endpoint is None and has_several_brokers(asked):
        _start_learner_of_all(asked)
        return
    joined = join(asked, endpoint, "learner")
    if joined is not None:
        _learn(joined.config, joined.origin, joined.fleet_id, joined.endpoint, joined.source)


def _start_learner_of_all(asked: Asked) -> None:
    """Run the reference learner of several brokers. It waits for the first of them; the others may come later."""
    config = asked.settings
    shares = [at_broker(config, index).fleet for index in range(config.broker.count)]
    places = [Rendezvous(share.rendezvous, config.broker.ports) for share in shares]
    if await_place(FirstOf(places), "learner", config, config.fleet.fleet_id) is None:
        return
    endpoints = [place.find("learner") for place in places]
    if not any(endpoints):
        raise FirstOf(places).stopped() or no_fleet_error(places[0].where, places[0].problem)
    config, origin = in_run(asked, whole_run_dir(config))
    for place, share in zip(places, shares, strict=True):
        if (published := place.look()) is not None:
            check_published(published, place.where, config, share.fleet_id, "learner")
        place.fleet_id = share.fleet_id
    _learn(config, origin, config.fleet.fleet_id, endpoints, places)


def _learn(
    config: FleetConfig,
    origin: str,
    fleet_id: str,
    where: str | Sequence[str],
    source: AddressSource | Sequence[AddressSource] | None,
) -> None:
    run_dir = _folder(Path(config.fleet.run_dir))
    set_up_logging(Identity(fleet_id, "learner"))
    at = where if isinstance(where, str) else ", ".join(address or "(not known yet)" for address in where)
    log.info("headrace %s learner at %s; config: %s", version("headrace"), at, origin)
    from headrace.deploy.fleet.checkpoint_copy import copied_to_redis

    health = _health_file(config, "learner")
    with no_exit_from(ModuleError, "the module"), health, copied_to_redis(run_dir, config.redis, fleet_id):
        part("run_learner")(
            config, endpoint=where, run_dir=run_dir, alive=health.alive, on_batch=health.progressed, source=source
        )


def start_env_host(asked: Asked, *, connect: str | None, slot: int | None) -> None:
    """Lend envs to the worker that `join_worker` finds, until told to stop, or refused."""
    joined = join_worker(asked, connect, slot)
    if joined is None:
        return
    config, where, source, sampling = joined.config, joined.endpoint, joined.source, joined.config.sampling
    keys = env_host_keys(config)
    set_up_logging(Identity(joined.fleet_id, ENV_HOST))
    told = version("headrace"), sampling.num_envs, sampling.env, where, joined.origin
    log.info("headrace %s env-host, %d x %s for the worker at %s; config: %s", *told)
    from headrace.workers.config import EnvRunnerConfig

    of_worker = {"env_placement": "process", "env_hosts_port": 0, "policies": None, "policy_mapping_fn": None}
    settings = sampling.model_dump() | of_worker
    with no_exit_from(EnvError, "the env"), _health_file(config, ENV_HOST) as health, suppress(StoppedError):
        most_s = _patience_s(config, is_watched=health.watched.is_watched)
        role = f"envs-{slot or 0}"
        place = FleetPlace(where, role, source, server="worker", patience_s=most_s, first_patience_s=most_s)

        def look() -> None:
            health.alive()
            if config.worker.ends_with_fleet and place.has_stopped(time.monotonic()):
                log.info("the fleet has stopped; this env host leaves, as worker.ends_with_fleet says")
                raise StoppedError("the fleet has stopped")

        part("run_env_host")(
            EnvRunnerConfig(**settings),
            where,
            keys,
            look,
            place,
            on_answer=health.progressed,
            elsewhere=source.elsewhere if isinstance(source, WorkerPortChoice) else str,
        )


def _health_file(config: FleetConfig, role: str) -> HealthFile:
    """Return the file for `headrace health`, in the run directory. Log each limit that is below the role's needs.

    A supervisor that started this process has already checked the whole fleet's needs.
    """
    watched = LivenessFile.from_environment()
    if not watched.is_watched:
        part("warn_of_limits")(config, role)
    run_dir, sampling = Path(config.fleet.run_dir).absolute() if config.fleet.run_dir else None, config.sampling
    first_env_s = sampling.construct_timeout_s if role == ENV_HOST else 0.0
    return HealthFile(
        run_dir,
        role,
        watched,
        starts_within_s=FIRST_SIGN_S + first_env_s + _patience_s(config, is_watched=watched.is_watched),
        silent_within_s=silence_limits(config)[role],
        recorders=run_dir / "recorders" if run_dir is not None and role == "worker" else None,
    )


def _patience_s(config: FleetConfig, *, is_watched: bool) -> float:
    """Return how long a process waits for a lost fleet: for ever under a supervisor, which restarts the fleet."""
    return math.inf if is_watched else config.worker.connect_timeout_s


@contextmanager
def no_exit_from(error_type: type[HeadraceError], whose: str) -> Iterator[None]:
    """Turn sys.exit in user code into an error: Headrace's exit codes have other meanings."""
    try:
        yield
    except SystemExit as error:
        raise error_type(f"{whose} called sys.exit({error.code!r}); it must raise an exception instead") from error


def _folder(path: Path) -> Path:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path.absolute()  # an env or a module may change the working directory
