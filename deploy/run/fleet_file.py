"""`DIR/fleet.json`: the fleet's processes and addresses, replaced in one step whenever a process starts or ends."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.broker.files.state_file import read_broker_file
from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.run.run_dir import RunDir, write_private
from headrace.schemas.basics.run_files import read_regular
from headrace.schemas.errors import RunDirError

_MODEL = ConfigDict(extra="ignore")


class _Entry(BaseModel):
    model_config = _MODEL
    name: str
    role: str
    slot: int | None = None
    restarts: int = 0
    last_words: str = ""
    """Text on how its last life ended."""
    recent_deaths: int = 0
    """Deaths that count towards `supervisor.restart_attempts`, as of the last one."""


class ProcessEntry(_Entry):
    """One living process."""

    incarnation: int
    pid: int
    started: float
    """Unix time, s."""
    state: str = "running"


class WaitingEntry(_Entry):
    """A process between two lives, or one that will not start again."""

    state: str = "restarting"


class FleetFile(BaseModel):
    """The content of fleet.json."""

    model_config = _MODEL
    version: int = 1
    fleet_id: str
    state: str = "starting"
    at_goal: bool = False
    """True if a run that drains or has stopped has reached its goal, so that learners elsewhere do not wait for it."""
    supervisor_pid: int = 0
    started: float = 0.0
    ended: float | None = None
    """Unix time, s, at which a run that has stopped did so."""
    config: str | None = None
    """Path of the file the configuration came from, if any."""
    endpoints: dict[str, str] = {}
    redis_url: str = ""
    redis_away_unix_s: float | None = None
    """Since when Redis has not answered; None while it does."""
    waits_for: str = ""
    """Whom a start waits for before it can tell anything in Redis, in words."""
    env_steps: int = 0
    """Env steps of all runs in this directory, as its supervisor last noted; 0: none was taken."""
    best_return: float | None = None
    """The best mean return of 100 episodes, as its supervisor last noted."""
    processes: list[ProcessEntry] = []
    waiting: list[WaitingEntry] = []
    incarnations: dict[str, int] = {}
    """Process name -> number of its lives in this directory; for a worker that is its incarnation, which only rises."""

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        write_private(path, orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2))


def read_fleet_file(path: Path) -> FleetFile:
    """Read the fleet described at `path`. Raises `RunDirError` when there is none to be read."""
    try:
        return FleetFile.model_validate_json(read_regular(path))
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError) and not path.parent.is_dir()
        why = "there is no such folder" if missing else f"it has no {path.name} to read ({error.strerror})"
        raise RunDirError(str(path.parent), why) from error
    except ValidationError as error:
        raise RunDirError(str(path.parent), f"its {path.name} is damaged ({error.errors()[0]['msg']})") from error


def read_addresses(run_dir: Path) -> tuple[str, dict[str, str]]:
    """Return (fleet id, endpoints) of the fleet in this directory, or of a broker that was started alone."""
    fleet, broker = run_dir / "fleet.json", run_dir / "broker.json"
    found = read_fleet_file(broker if broker.exists() and not fleet.exists() else fleet)
    return found.fleet_id, found.endpoints


@contextmanager
def told_as_starting(run_dir: RunDir) -> Iterator[None]:
    """Mark a stopped run in fleet.json as starting, during the check before a start.

    Learners and workers elsewhere then wait for the run. If the check fails, restore the old file.
    """
    before = read_fleet_file(run_dir.fleet_json) if run_dir.fleet_json.exists() else None
    if before is None or before.state != "stopped":
        yield
        return
    before.model_copy(update={"state": "starting", "endpoints": {}}).write(run_dir.fleet_json)
    try:
        yield
    except BaseException:
        before.write(run_dir.fleet_json)
        raise


def continue_fleet(run_dir: RunDir, fleet_id: str) -> FleetFile:
    """Return the file of a new fleet that continues the earlier run in the directory.

    It keeps the fleet id, or that of a broker that ran alone there, unless `fleet_id` names another. Its incarnations
    are at least the highest ever used there. Raises `RunDirError` if a broker has served another fleet there.
    """
    new = FleetFile(fleet_id=f"fleet-{secrets.token_hex(4)}")
    page = read_fleet_file(run_dir.fleet_json) if run_dir.fleet_json.exists() else new
    served = read_broker_file(run_dir.path)
    if served is not None and fleet_id not in ("", served.fleet_id):
        reason, remedy = f"it is of fleet {served.fleet_id!r}, not {fleet_id!r}", "leave fleet.fleet_id out"
        raise RunDirError(str(run_dir.path), reason, f"{remedy}, or name another run directory")
    incarnations = dict(page.incarnations)
    for (slot, incarnation), _ in recorders_in(run_dir.recorders):
        name = f"worker-{slot}"
        incarnations[name] = max(incarnations.get(name, 0), incarnation)
    return FleetFile(
        fleet_id=served.fleet_id if served is not None else fleet_id or page.fleet_id,
        incarnations=incarnations,
        env_steps=page.env_steps,
        best_return=page.best_return,
        redis_url=page.redis_url,
    )
