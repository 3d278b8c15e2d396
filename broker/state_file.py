"""run_dir/broker.json: the broker's endpoints, and the state for a restart. Mode 0600, replaced atomically.

The broker writes it before it sends an answer that depends on it. So it never gives out an incarnation or learner epoch
twice, with Redis or without.
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.broker.limits import BrokerState
from headrace.schemas.errors import RunDirError


class Endpoints(BaseModel):
    """The address for each role to connect to."""

    model_config = ConfigDict(frozen=True)
    worker: str
    learner: str
    weights: str


class BrokerFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    pid: int
    fleet_id: str
    endpoints: Endpoints
    epoch: int = 0
    learner_token: str = ""
    incarnations: dict[int, int] = {}

    def state(self) -> BrokerState:
        """Return the part of it from which the broker's core goes on."""
        return BrokerState(self.epoch, self.learner_token, dict(self.incarnations))


def file_path(run_dir: Path) -> Path:
    """Return the path of the file in `run_dir`."""
    return run_dir / "broker.json"


def read_broker_file(run_dir: Path) -> BrokerFile | None:
    """Read what an earlier broker of this run directory left; None without one.

    Raises `RunDirError` for a damaged file.
    """
    path = file_path(run_dir)
    try:
        return BrokerFile.model_validate(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        reason = f"{path.name} is damaged ({type(error).__name__}); remove it only if no worker of the fleet lives"
        raise RunDirError(str(run_dir), reason) from error


def write_broker_file(run_dir: Path, fleet_id: str, endpoints: Endpoints, state: BrokerState) -> None:
    """Replace the file. Raises `RunDirError`."""
    content = BrokerFile(
        pid=os.getpid(),
        fleet_id=fleet_id,
        endpoints=endpoints,
        epoch=state.epoch,
        learner_token=state.learner_token,
        incarnations=state.incarnations,
    )
    path = file_path(run_dir)
    beside = path.with_suffix(".new")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(orjson.dumps(content.model_dump(mode="json"), option=orjson.OPT_NON_STR_KEYS))
        beside.replace(path)
    except OSError as error:
        raise RunDirError(str(run_dir), error.strerror or str(error)) from error
