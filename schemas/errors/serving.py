"""Errors that a policy server tells its clients, in addition to those of `episodes.py`.

    ServingError
    ├── UnknownSessionError     the session was never opened, has ended, or was silent for too long
    └── MessageTooLargeError    more bytes than the server takes

On the wire an error is its `code`, its sentence and its facts, and a client in Python raises the same class again.
After "not_yet" the client may repeat the same request, which takes no second step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.schemas.errors import DecodeError, EnvContractError, ExitCode, HeadraceError
from headrace.schemas.errors.episodes import PROBLEMS, EpisodeError

FAILED = "the server failed at this; its log says how"
"""The sentence for a request at which the server itself failed."""


class ServingError(HeadraceError):
    """A policy server refuses what a client asked for. `code`, of `HTTP_STATUS`, is the reason's word on the wire."""

    exit_code = ExitCode.PROTOCOL
    code = "failed"

    def __init__(self, message: str, code: str = "") -> None:
        self.code = code or self.code
        super().__init__(message)


class UnknownSessionError(ServingError):
    """The session was never opened, has ended, or was silent for too long."""

    code = "unknown_session"


class MessageTooLargeError(ServingError):
    """A message has more bytes than the server takes."""

    code = "too_large"


HTTP_STATUS: Mapping[str, int] = {
    "bad_request": 400,
    "unauthorized": 401,
    "unknown_session": 404,
    "unknown_episode": 404,
    "too_slow": 408,
    "session_taken": 409,
    "step_order": 409,
    "superseded": 409,
    "already_started": 409,
    "already_completed": 409,
    "busy": 409,
    "no_action": 409,
    "cannot_log": 409,
    "aborted": 410,
    "too_large": 413,
    "not_in_space": 422,
    "server_full": 503,
    "no_place": 503,
    "closed": 503,
    "not_yet": 503,
}
"""HTTP status by code; 500 for any other."""


def code_of(error: HeadraceError) -> str:
    """Return the word for an error on the wire."""
    if isinstance(error, ServingError | EpisodeError):
        return error.code
    if isinstance(error, EnvContractError):
        return "not_in_space"
    return "bad_request" if isinstance(error, DecodeError) else "failed"


def facts_of(error: HeadraceError) -> dict[str, Any]:
    """Return the attributes of an error that JSON can carry."""
    facts = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    facts.pop("code", None)  # it has a field of its own
    return facts


def error_of(code: str, message: str, facts: Mapping[str, Any]) -> HeadraceError:
    """Rebuild the error that a server sent, with its own sentence. An unknown code gives a `ServingError`."""
    cls = _BY_CODE.get(code, ServingError)
    error = cls.__new__(cls)
    HeadraceError.__init__(error, message)
    vars(error).update(facts, code=code)
    return error


def _tree(root: Any) -> Iterator[Any]:
    for cls in root.__subclasses__():
        yield cls
        yield from _tree(cls)


_BY_CODE: dict[str, type[HeadraceError]] = {
    "not_in_space": EnvContractError,
    **dict.fromkeys(PROBLEMS, EpisodeError),
    **{cls.code: cls for root in (ServingError, EpisodeError) for cls in _tree(root)},
}
