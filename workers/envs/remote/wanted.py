"""Which envs a worker wants of a host that comes: of its own kind, and like those that are here."""

from __future__ import annotations

import math

from headrace.schemas.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.wire import DEFAULT_LIMITS
from headrace.workers.agents.packing import Packing, is_packed
from headrace.workers.config import EnvRunnerConfig


def problem_of(spaces: Spaces, config: EnvRunnerConfig, first: Spaces | None) -> str:
    """Why envs with `spaces` are not wanted, in words, or nothing; `first` are those of the first host.

    Raises `DecodeError` for spaces that no env can have.
    """
    several = config.is_multi_agent
    if is_packed(spaces) != several:
        theirs, ours = ("one agent", "several") if several else ("several agents", "one")
        return f"its envs are of {theirs}, and those of this worker of {ours}, as sampling.policies says"
    if first is not None and spaces != first:
        return f"its envs have {spaces!r:.400}, and those of the first env host {first!r:.400}"
    if several:
        Packing.of(spaces)
    for what, space in (("observation", spaces.observation), ("action", spaces.action)):
        size = sum(math.prod(leaf_shape(leaf)) * column_dtype(leaf).itemsize for _, leaf in leaves(space, what))
        if not 0 < size <= DEFAULT_LIMITS.payload_bytes:
            return f"one {what} of its envs has {size} bytes; 1 to {DEFAULT_LIMITS.payload_bytes} can be sent"
    return ""
