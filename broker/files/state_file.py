"""run_dir/broker.json: the broker's endpoints, and the state for a restart. Mode 0600, replaced atomically.

The broker writes it before it sends an answer that depends on it. So it never gives out an incarnation or learner epoch
twice, with Redis or without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.broker.batches.limits import BrokerState, GroupState
from headrace.schemas.basics.bounds import MOST_GROUPS, EpochOrNone, GroupName, IncarnationOrNone, Slot
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.errors import RunDirError, reading, writing


class Endpoints(BaseModel):
    """The address for each role to connect to."""

    model_config = ConfigDict(frozen=True)
    worker: str
    learner: str
    weights: str

    def port(self, role: str) -> int:
        """Return the TCP port for a role; 0 for a Unix socket."""
        endpoint: str = getattr(self, role)
        return int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp:") else 0


class LeaseOfGroup(BaseModel):
    """The lease of a consumer group besides the learner's."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True)
    epoch: EpochOrNone = 0
    learner_token: str = ""


class BrokerFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    pid: int
    fleet_id: str
    endpoints: Endpoints
    epoch: EpochOrNone = 0
    learner_token: str = ""
    incarnations: dict[Slot, IncarnationOrNone] = {}
    groups: Annotated[dict[GroupName, LeaseOfGroup], Field(max_length=MOST_GROUPS)] = {}
    has_learner: bool | None = None
    """True if a learner was connected at the broker's last report; None before its first."""
    weight_shapes: dict[str, dict[str, list[int]]] = {}
    weight_kinds: dict[str, str] = {}
    """What workers have told of the weights that they load; a save of a checkpoint is checked against it."""

    def state(self) -> BrokerState:
        """Return the part of the file from which the broker's core goes on."""
        groups = {name: GroupState(lease.epoch, lease.learner_token) for name, lease in self.groups.items()}
        return BrokerState(self.epoch, self.learner_token, dict(self.incarnations), groups)


def file_path(run_dir: Path) -> Path:
    """Return the path of the file in `run_dir`."""
    return run_dir / "broker.json"


def read_broker_file(run_dir: Path) -> BrokerFile | None:
    """Read what an earlier broker of this run directory left; None without one.

    Raises `RunDirError` for a damaged file, and for one with a number out of bounds.
    """
    path = file_path(run_dir)
    try:
        with reading(path, "the broker's state"):
            content = read_regular(path)
        return BrokerFile.model_validate(orjson.loads(content))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        reason = f"{path.name} is damaged ({type(error).__name__}); remove it only if no worker of the fleet lives"
        raise RunDirError(str(run_dir), reason) from error


def write_broker_file(
    run_dir: Path,
    fleet_id: str,
    endpoints: Endpoints,
    state: BrokerState,
    has_learner: bool | None = None,
    weights_told: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Replace the file. Raises `RunDirError`."""
    content = BrokerFile(
        pid=os.getpid(),
        fleet_id=fleet_id,
        endpoints=endpoints,
        epoch=state.epoch,
        learner_token=state.learner_token,
        incarnations=state.incarnations,
        groups={name: LeaseOfGroup.model_validate(lease) for name, lease in state.groups.items()},
        has_learner=has_learner,
        **weights_told,
    )
    path = file_path(run_dir)
    with writing(path, "the broker's state"):
        replace_private(path, orjson.dumps(content.model_dump(mode="json"), option=orjson.OPT_NON_STR_KEYS))
