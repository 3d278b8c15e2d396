"""Checks the envs of a host that connects: a worker takes only envs like those it has."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.frames.wire import DEFAULT_LIMITS

KindProblem = Callable[[Spaces], str]
"""Returns in words why envs with these spaces are of the wrong kind for the worker; empty if they fit.

Raises `DecodeError` for spaces that no env can have.
"""


def problem_of(spaces: Spaces, kind_problem: KindProblem, first: Spaces | None) -> str:
    """Return in words why envs with `spaces` are refused; empty if they fit. `first` are the first host's spaces.

    Raises `DecodeError` for spaces that no env can have.
    """
    if problem := kind_problem(spaces):
        return problem
    if first is not None and spaces != first:
        return f"its envs have {spaces!r:.400}, and those of the first env host {first!r:.400}"
    for what, space in (("observation", spaces.observation), ("action", spaces.action)):
        size = sum(math.prod(leaf_shape(leaf)) * column_dtype(leaf).itemsize for _, leaf in leaves(space, what))
        if not 0 < size <= DEFAULT_LIMITS.payload_bytes:
            return f"one {what} of its envs has {size} bytes; 1 to {DEFAULT_LIMITS.payload_bytes} can be sent"
    return ""
