"""Failures of envs, in groups of the same cause: in heartbeats, and in the Redis hash `errors`."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from headrace.schemas.basics.bounds import ListOf, Natural, Positive, Slot, TaskName

MOST_GROUPS = 32
"""Groups of one worker. The failures of further ones are in a group of kind `OTHERS`."""

OTHERS = "others"
"""Kind of the group for failures without a group of their own, and its field in Redis."""

INFO_LEFT_OUT = "info_left_out"
"""Kind of the groups of values that infos go without. They are no failures: the steps are delivered."""

MOST_TRACEBACK = 4096
MOST_SLOTS = 8
MOST_TOLD_TASKS = 64
"""Failures of one group whose tasks a worker tells."""

OF_TASK = "; its task was "
"""Separator between the text of an env's failure and the task at its end."""

UnixSeconds = Annotated[float, Field(ge=0, le=1e11)]


class EnvErrorGroup(BaseModel):
    """The failures of envs in one life of a worker that have kind, env, exception and place in common.

    `message` and `traceback` are those of one of them.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    kind: Annotated[str, Field(max_length=40)]
    """As in `Discard`: env_exception, env_hang, env_bad_data, env_crash, env_host_lost, callback_exception, ..."""
    env: Annotated[str, Field(max_length=200)] = ""
    exception: Annotated[str, Field(max_length=200)] = ""
    """Name of its class."""
    message: Annotated[str, Field(max_length=500)] = ""
    where: Annotated[str, Field(max_length=300)] = ""
    """"FILE:LINE" where it was raised; of bad data, what was bad; of values left out of infos, their place."""
    count: Positive = 1
    first_unix_s: UnixSeconds = 0.0
    last_unix_s: UnixSeconds = 0.0
    traceback: Annotated[str, Field(max_length=MOST_TRACEBACK)] = ""
    tasks: Annotated[ListOf[TaskName], Field(max_length=MOST_TOLD_TASKS)] = []
    """The task of each of its newest failures, the newest last; empty while no failure had a task."""

    @model_serializer(mode="wrap")
    def _without_empty_tasks(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = dump(self)
        if not self.tasks:
            told.pop("tasks", None)
        return told

    @property
    def fingerprint(self) -> str:
        """Return the digest of what its failures have in common."""
        if self.kind == OTHERS:
            return OTHERS
        return fingerprint_of(self.kind, self.env, self.exception, self.where)


class EnvErrorRow(EnvErrorGroup):
    """One group of a fleet, over all workers and lives: a field of the Redis hash `errors`."""

    slots: Annotated[ListOf[Slot], Field(max_length=MOST_SLOTS)] = []
    """Slots of the workers that had such failures, the newest last."""
    tasks: Annotated[ListOf[TaskName], Field(max_length=MOST_SLOTS)] = []
    """The tasks of its newest failures, each once, the newest last."""
    lives: dict[str, Natural] = {}
    """By "slot/incarnation", failures that the newest life of a slot has reported so far; `count` includes them."""


def fingerprint_of(kind: str, env: str, exception: str, where: str) -> str:
    """Return the digest of what the failures of a group have in common."""
    facts: list[Any] = [kind, env, exception, where]
    return hashlib.blake2b(orjson.dumps(facts), digest_size=8).hexdigest()
