"""One failure of one env, and its line in the log."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.schemas.accounts.env_errors import OF_TASK
from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.printable import plain, without_episode
from headrace.schemas.chunks.task import Task, task_name
from headrace.schemas.errors import (
    CallbackError,
    EnvContractError,
    EnvCrashError,
    EnvHangError,
    EnvHostLostError,
    EnvNeighbourError,
    EnvRaisedError,
    HeadraceError,
)
from headrace.schemas.errors.episodes import ClientLostError, EpisodeAbortedError
from headrace.schemas.messages.message_base import MOST_SHORT_DETAIL
from headrace.workers.envs.context import StepFailedRecreateEnv
from headrace.workers.envs.error_text import message_of
from headrace.workers.metrics.totals import FailureGroups, first_bytes, last_bytes

if TYPE_CHECKING:
    from headrace.workers.envs.lane import Episode

logger = logging.getLogger(__name__)

_PLAIN = str, bytes, int, float, complex, np.generic, np.ndarray
_MOST_OF_TASK = MOST_SHORT_DETAIL // 2
_PLACE = re.compile(r'File "([^"\n]+)", line (\d+)')

_REASONS: dict[type[BaseException], Discard] = {
    CallbackError: Discard.CALLBACK_EXCEPTION,
    EnvContractError: Discard.ENV_BAD_DATA,
    EnvHangError: Discard.ENV_HANG,
    EnvCrashError: Discard.ENV_CRASH,
    EnvNeighbourError: Discard.ENV_NEIGHBOUR,
    EnvHostLostError: Discard.ENV_HOST_LOST,
    ClientLostError: Discard.CLIENT_LOST,
}


@dataclass(slots=True, eq=False)
class Failure:
    """A failure in one lane. `stepped`: `env.step` returned, but with a bad value."""

    lane: int
    error: BaseException
    stepped: bool = False
    discarded: int = 0
    at: str = "reset"
    """Place of the failure, in words, for the log."""
    unbegun: Episode | None = None
    """The episode that was created for a reset that failed."""
    hint: str = ""
    """In words, that its action was outside the env's space."""
    task: Task | None = None
    """The task of its episode, or of the reset that failed."""
    view: Any = None
    """The sampler's view of the open episode, if a callback is to see it."""
    episode: Any = None
    """The `FailedEpisode` that failed at a step, if it is kept to be repeated."""
    rerun: str = ""
    """The command that repeats it; "" where none can."""

    @property
    def reason(self) -> Discard:
        """The reason under which its unfinished steps are discarded."""
        return next((name for kind, name in _REASONS.items() if isinstance(self.error, kind)), Discard.ENV_EXCEPTION)

    @property
    def is_of_env(self) -> bool:
        """Return whether the env caused the failure. False for a request to be rebuilt, or another cause."""
        innocent = StepFailedRecreateEnv | CallbackError | EnvNeighbourError | EnvHostLostError | ClientLostError
        innocent |= EpisodeAbortedError  # raised in `run()` of an external env, which did not catch it
        return not isinstance(self.error, innocent)

    @property
    def is_of_host(self) -> bool:
        """Return whether the env was lost with its host, which says nothing about the next env."""
        return isinstance(self.error, EnvHostLostError)

    @property
    def was_asked_for(self) -> bool:
        """Return whether the env asked to be rebuilt, which is no error."""
        return isinstance(self.error, StepFailedRecreateEnv)

    @property
    def about(self) -> str:
        """Return what may explain it, in words: the hint, and the task; "" without both."""
        task = f"{OF_TASK}{task_name(self.task.values)}" if self.task is not None else ""
        return f"{self.hint}{task}".removeprefix("; ")

    def note(self, groups: FailureGroups, env: Any) -> None:
        """Count it in its group. A request to be rebuilt, or a failure caused by a neighbour, does not count."""
        error = self.error
        if self.was_asked_for or isinstance(error, EnvNeighbourError):
            return
        if isinstance(error, CallbackError) and error.__cause__ is not None:
            error = error.__cause__
        kind, message = in_its_env(error)
        task = self.task.published if self.task is not None else ""
        groups.note(self.reason.value, name_of(env), kind, _where(error), message, lambda: _trace(error), task)

    def in_words(self) -> str:
        """Return its kind, env, step, error and task, on one line. An error is cut where a task stands behind it."""
        error = f"{type(self.error).__name__}: {message_of(self.error)}{self.hint and f'; {self.hint}'}"
        said = f"{self.reason.value} in env {self.lane} at {without_episode(self.at)}: {' '.join(error.split())}"
        if self.task is None:
            return said
        task = f"{OF_TASK}{task_name(self.task.values)}"[:_MOST_OF_TASK]
        return said[: MOST_SHORT_DETAIL - len(task)] + task

    def report(self, wait_s: float, attempt: int, attempts: int, *, with_traceback: bool) -> None:
        """Log the failure in one line, and with the traceback if that was not logged before."""
        error, said = self.error, message_of(self.error)  # an error of the user's own may not tell its text
        if self.is_of_host:
            logger.warning(
                "env %d is gone: %s; %d steps discarded, waiting for a host", self.lane, said, self.discarded
            )
            return
        logger.log(
            logging.INFO if self.was_asked_for else logging.ERROR,
            "env %d failed at %s (%s: %s); %d steps discarded, rebuilding%s (attempt %d of %d)%s",
            self.lane,
            self.at,
            type(error).__name__,
            f"{said}; {self.about}" if self.about else said,
            self.discarded,
            f" in {wait_s:.3g} s" if wait_s else "",
            attempt,
            attempts,
            f"; to repeat it: {self.rerun}" if self.rerun else "",
            exc_info=error if with_traceback and not self.was_asked_for else None,
            extra={"env_index": self.lane, "discarded": self.discarded, "attempt": attempt},
        )


def in_its_env(error: BaseException) -> tuple[str, str]:
    """Return the class name and the message of an error, the same for an env here and for one in another process."""
    if isinstance(error, EnvRaisedError):
        return error.kind, error.message
    return type(error).__name__, message_of(error).partition("\n")[0]


def let_go(error: BaseException | None) -> None:
    """Clear the variables in the frames of the error and of its causes, and in the frames that called these.

    They hold the failed env, with its port or its memory, which the env that is built in its place may need. So may the
    objects that an error has been given.
    """
    todo, seen = [error], set()
    while todo:
        error = todo.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _clear(frame)
        todo += [error.__cause__, error.__context__]
        if isinstance(error, BaseExceptionGroup):
            todo += error.exceptions
        if not isinstance(error, HeadraceError):
            _drop_objects(error)


def _drop_objects(error: BaseException) -> None:
    """Take from a user's error all that is no plain data."""
    if isinstance(error, AttributeError):
        error.obj = None  # often the env
    error.args = tuple(each if _is_plain(each) else f"<{type(each).__name__}>" for each in error.args)
    for name, value in list(vars(error).items()):
        if not _is_plain(value):
            del vars(error)[name]


def _is_plain(value: Any, levels: int = 4) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return levels > 0 and all(_is_plain(each, levels - 1) for each in value)
    return value is None or isinstance(value, _PLAIN)


def _clear(frame: FrameType | None) -> None:
    """Clear the frame, and its callers up to the first that has not returned."""
    with suppress(RuntimeError):
        while frame is not None:
            frame.clear()
            frame = frame.f_back


def name_of(env: Any) -> str:
    """Return the name of an env in a config: an id, an import path, or the name of a creator."""
    if isinstance(env, str) or env is None:
        return env or ""
    named = env if hasattr(env, "__qualname__") else type(env)
    return f"{named.__module__}:{named.__qualname__}"


def _where(error: BaseException) -> str:
    """Return "FILE:LINE" where the error was raised or its process hung. For bad data, return the kind of data."""
    if isinstance(error, EnvContractError):
        return error.what
    if isinstance(error, EnvRaisedError | EnvHangError | EnvCrashError):
        places = _PLACE.findall(error.trace if isinstance(error, EnvRaisedError) else error.stack)
        file, line = places[-1 if isinstance(error, EnvRaisedError) else 0] if places else ("", "")
        return plain(f"{file}:{line}") if places else ""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return plain(f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}") if step is not None else ""


def _trace(error: BaseException) -> str:
    if isinstance(error, EnvHangError | EnvCrashError):
        return first_bytes(error.stack)  # as faulthandler writes it, the newest call first
    return last_bytes(error.trace if isinstance(error, EnvRaisedError) else "".join(traceback.format_exception(error)))
