"""Messages that carry tasks from a teacher through the broker to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.schemas.basics.bounds import ChosenName, ListOf, Token, Version
from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.task import check_values
from headrace.schemas.errors import EncodeError
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages.message_base import Message

MOST_TASKS = 4096
MOST_TASKS_BYTES = 1_000_000
"""Most tasks of one distribution, and most bytes of them as JSON: the header of a message takes 1 MiB."""
MOST_GROUP = 1 << 16
_MOST_WEIGHT = 1e9


class WeightedTask(BaseModel):
    """One task of a distribution: an episode gets it with a probability proportional to its weight."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    values: dict[str, Any]
    weight: float = Field(default=1.0, gt=0, le=_MOST_WEIGHT)

    @field_validator("values")
    @classmethod
    def _check(cls, values: dict[str, Any]) -> dict[str, Any]:
        try:
            return check_values(values)
        except EncodeError as error:
            raise ValueError(str(error)) from error


class TeacherHello(Message):
    """Announces a teacher. A `TasksAck` answers it, with the teacher's new epoch and seq 0."""

    KIND = MessageKind.HELLO
    role: Literal["teacher"] = "teacher"
    token: Token
    """Names this teacher, so that a repeated HELLO is answered with the same epoch."""
    fleet_id: ChosenName = ""
    """Empty: any fleet that this broker serves."""


class Tasks(Message):
    """Teacher to broker to workers: from the next resets on, each episode gets one of these tasks.

    An empty list takes the tasks away: episodes have none from their next reset on.
    """

    KIND = MessageKind.TASKS
    TO = ("broker", "worker")
    version: Version
    """(teacher's epoch, seq), ordered as a pair. A newer one replaces an older one."""
    tasks: Annotated[ListOf[WeightedTask], Field(max_length=MOST_TASKS)] = []
    group: Annotated[int, Field(ge=0, le=MOST_GROUP)] = 0
    """Number of episodes that begin with the same seed and task; 0: each draws its own."""

    @field_validator("tasks")
    @classmethod
    def _check(cls, tasks: list[WeightedTask]) -> list[WeightedTask]:
        if problem := _too_large(tasks):
            raise ValueError(problem)
        return tasks

    @classmethod
    def of(cls, task: Any, version: tuple[int, int], group: int = 0) -> Tasks:
        """Return the message of a `task` and `group` as `TaskPublisher.publish` takes them. Raises `EncodeError`."""
        given = [] if task is None else [task] if isinstance(task, Mapping) else task
        if not isinstance(given, list | tuple):
            raise EncodeError(f"publish a task such as {{'level': 3}}, a list of tasks, or None, not {brief(given)}")
        if len(given) > MOST_TASKS:
            raise EncodeError(f"{len(given):,} tasks cannot be published at once; give at most {MOST_TASKS:,}")
        if not isinstance(group, int) or not 0 <= group <= MOST_GROUP:
            raise EncodeError(f"group = {brief(group)} cannot be published; give an integer of 0 to {MOST_GROUP:,}")
        tasks = list(map(_weighted, given))
        if problem := _too_large(tasks):
            raise EncodeError(problem)
        return cls.model_construct(version=version, tasks=tasks, group=group)


def _too_large(tasks: list[WeightedTask]) -> str:
    """Return what is wrong with the size of these tasks; "" for nothing."""
    size = len(orjson.dumps([vars(task) for task in tasks]))
    if size <= MOST_TASKS_BYTES:
        return ""
    return (
        f"{len(tasks):,} tasks of {size:,} bytes as JSON; at most {MOST_TASKS_BYTES:,} may be published at once: give "
        "envs names or seeds from which they make the rest"
    )


def _weighted(item: Any) -> WeightedTask:
    values, given = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
    try:
        weight = float(given)
    except (TypeError, ValueError, OverflowError):
        weight = 0.0
    if not 0 < weight <= _MOST_WEIGHT:
        raise EncodeError(
            f"a task's weight {brief(given)} cannot be published; give a number above 0 and up to {_MOST_WEIGHT:g}"
        )
    return WeightedTask.model_construct(values=check_values(values), weight=weight)


class TasksAck(Message):
    """Broker to teacher: the broker keeps this version, in its run directory too."""

    KIND = MessageKind.TASKS_ACK
    TO = ("teacher",)
    version: Version
