"""Errors as JSON, on their way from a process of envs to its driver."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from headrace.schemas.errors import (
    EnvContractError,
    EnvCrashError,
    EnvError,
    EnvHangError,
    EnvNeighbourError,
    EnvRaisedError,
    UnknownEnvError,
)
from headrace.workers.envs.context import StepFailedRecreateEnv
from headrace.workers.envs.error_text import message_of, plain

_LONGEST = 20_000
"""The longest message or traceback, in characters. More is cut off."""


_FACTS: dict[str, tuple[type[EnvError], tuple[str, ...]]] = {
    "hang": (EnvHangError, ("env_index", "phase", "timeout_s", "setting", "stack")),
    "crash": (EnvCrashError, ("pid", "cause", "during", "stack", "output")),
    "neighbour": (EnvNeighbourError, ("culprit", "cause")),
}
"""Errors of a whole process, which only an env host passes on, with the attributes that make them."""


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return the error as JSON, from which `error_from_json` makes the same error or an `EnvRaisedError`."""
    match error:
        case EnvContractError():
            return {"is": "contract", "what": error.what, "seen": error.seen, "expected": error.expected}
        case UnknownEnvError():
            return {"is": "unknown", "env": error.env, "reason": error.reason}
        case StepFailedRecreateEnv():
            return {"is": "recreate", "message": message_of(error)[:_LONGEST]}
        case EnvRaisedError():  # passed on by an env host
            return {"is": "raised", "kind": error.kind, "message": error.message, "trace": error.trace}
    for name, (kind, facts) in _FACTS.items():
        if isinstance(error, kind):
            return {"is": name, **{fact: getattr(error, fact) for fact in facts}}
    trace = plain("".join(traceback.format_exception(error)))
    return {
        "is": "raised",
        "kind": type(error).__name__,
        "message": message_of(error)[:_LONGEST],
        "trace": trace[-_LONGEST:],
    }


def error_from_json(told: Mapping[str, Any]) -> Exception:
    """Return Headrace's errors as they were, and other errors as `EnvRaisedError`: their class may not exist here."""
    match told["is"]:
        case "contract":
            return EnvContractError(told["what"], told["seen"], told["expected"])
        case "unknown":
            return UnknownEnvError(told["env"], told["reason"])
        case "recreate":
            return StepFailedRecreateEnv(told["message"])
    if told["is"] in _FACTS:
        kind, facts = _FACTS[told["is"]]
        return kind(*(told[fact] for fact in facts))
    return EnvRaisedError(told["kind"], told["message"], told["trace"])
