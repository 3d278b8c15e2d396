"""Types of the integers in messages, and of short names: each has the bound that its meaning gives.

These bounds hold wherever a message is read, and keep sums far below 2^63. The broker checks that counts add up too
(`broker/sessions/book_checks.py`); docs/internals/threat-model.md says what else is bounded.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import FailFast, Field, Strict

T = TypeVar("T")

MOST_COUNT = (1 << 53) - 1
"""Above it numbers in Lua and JavaScript stop being exact. A million steps a second reach it after 285 years."""

MOST_LIVES = 999_999_999
"""Slots and incarnations have nine digits at most in the names of recorder files."""

MOST_EPOCH = (1 << 40) - 1
MOST_WEIGHTS_SEQ = (1 << 48) - 1
"""Fifteen digits at most, as in the pointer to the weights in Redis."""

MOST_BYTES = (1 << 48) - 1

ListOf = Annotated[list[T], FailFast()]
"""A list whose check ends at its first wrong item. Otherwise pydantic makes an error for each: half a million of them,
from a message of 1 MiB, take 3 s and 800 MiB.
"""

WINDOW = 1024
"""The most batches a worker may keep unsettled: its recorder has a place for each."""

MOST_SECONDS = 1e10
"""More than three centuries."""

Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]

MOST_SILENCE_S = 86_400.0
"""A day: the longest lease, and the longest time that a peer may announce to be silent."""

Natural = Annotated[int, Field(ge=0, le=MOST_COUNT)]

Positive = Annotated[int, Field(ge=1, le=MOST_COUNT)]

Slot = Annotated[int, Field(ge=0, le=MOST_LIVES)]

Incarnation = Annotated[int, Field(ge=1, le=MOST_LIVES)]

IncarnationOrNone = Annotated[int, Field(ge=0, le=MOST_LIVES)]
"""0: none yet."""

Epoch = Annotated[int, Field(ge=1, le=MOST_EPOCH)]

EpochOrNone = Annotated[int, Field(ge=0, le=MOST_EPOCH)]
"""0: none yet."""

WeightsSeq = Annotated[int, Field(ge=0, le=MOST_WEIGHTS_SEQ)]

Version = Annotated[tuple[EpochOrNone, WeightsSeq], Strict(False)]
"""(learner_epoch, seq) of weights, ordered as a pair; (0, 0) means no weights yet."""

BatchCount = Annotated[int, Field(ge=0, lt=1 << 32)]
"""Steps or chunks of one batch."""

OpenSteps = Annotated[int, Field(ge=0, le=1 << 30)]
"""Steps of one worker that are in no batch yet: a fragment that fits its memory."""

Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]

Pid = Annotated[int, Field(ge=0, lt=1 << 32)]

MOST_REASONS = 64
"""Reasons for which steps were discarded or dropped: more than twice those that there are."""

Reason = Annotated[str, Field(max_length=100)]
"""The name of such a reason, or of why a worker waits. A newer peer may know other ones."""

Token = Annotated[str, Field(max_length=120)]
"""The word by which a process is known again."""

GROUP_PATTERN = r"[a-z0-9][a-z0-9_-]{0,31}"
"""Names of groups, of keys and of consumers: they are part of file names, messages and log lines."""

TRAIN = "train"
"""The consumer group of the learner that publishes the weights. Each fleet has it."""

MOST_GROUPS = 16
"""Most consumer groups of a fleet besides `TRAIN`."""

MOST_RANKS = 1024
"""Most processes that share the batches of one consumer group."""

GroupName = Annotated[str, Field(pattern=rf"^{GROUP_PATTERN}$")]

ChosenName = Annotated[str, Field(max_length=600)]
"""A name that a user chose, of a fleet or of a policy."""

MOST_TASKS = 32
"""Tasks that have figures of their own at once."""

OTHER_TASKS = "other tasks"
"""The name under which the figures of all other tasks are summed up."""

MOST_TASK_NAME = 120

TaskName = Annotated[str, Field(max_length=MOST_TASK_NAME)]
"""The name of a task in figures (`task_name` in `schemas/chunks/task.py`); "" for no task."""

HIGHEST_PORT = 65_535

BROKER_CONNECTIONS = 4096
"""Connections at each port of a broker. Beyond that a new one is closed."""
