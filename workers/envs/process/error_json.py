"""Errors as JSON, on their way from a process of envs to its driver."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from headrace.schemas.basics.printable import plain
from headrace.schemas.errors import (
    EnvContractError,
    EnvCrashError,
    EnvHangError,
    EnvNeighbourError,
    EnvRaisedError,
    UnknownEnvError,
)
from headrace.workers.envs.context import StepFailedRecreateEnv
from headrace.workers.envs.error_text import message_of

_LONGEST = 20_000
"""The longest message or traceback, in characters. More is cut off."""


_FACTS: dict[str, tuple[type[Exception], tuple[str, ...]]] = {
    "contract": (EnvContractError, ("what", "seen", "expected")),
    "unknown": (UnknownEnvError, ("env", "reason")),
    "recreate": (StepFailedRecreateEnv, ("message",)),
    "raised": (EnvRaisedError, ("kind", "message", "trace")),
    "hang": (EnvHangError, ("env_index", "phase", "timeout_s", "setting", "stack")),
    "crash": (EnvCrashError, ("pid", "cause", "during", "stack", "output")),
    "neighbour": (EnvNeighbourError, ("culprit", "cause")),
}
"""Errors, with the attributes that make them. The last three are of a process; only an env host passes them on."""


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return the error as JSON, from which `error_from_json` makes the same error or an `EnvRaisedError`."""
    message = message_of(error)[:_LONGEST]
    if isinstance(error, StepFailedRecreateEnv):
        return {"is": "recreate", "message": message}
    for name, (kind, facts) in _FACTS.items():
        if isinstance(error, kind):
            return {"is": name, **{fact: getattr(error, fact) for fact in facts}}
    trace = plain("".join(traceback.format_exception(error)))[-_LONGEST:]
    return {"is": "raised", "kind": type(error).__name__, "message": message, "trace": trace}


def error_from_json(told: Mapping[str, Any]) -> Exception:
    """Return Headrace's errors as they were, and other errors as `EnvRaisedError`: their class may not exist here."""
    kind, facts = _FACTS.get(told["is"], _FACTS["raised"])
    return kind(*(told[fact] for fact in facts))
