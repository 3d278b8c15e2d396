"""Envs of which each lane has a fault of its own, and the callback that notes what became of them."""

from __future__ import annotations

import os
from typing import Any

from headrace.workers import EnvContext
from support.envs import inline_faults, troubled

noted: list[tuple[int, str]] = []
"""(lane, class and sentence of its error) of each failure that this process was told."""


class Noting:
    """A callback object, to be named by its import path."""

    def on_env_failed(self, exc: Any, env_index: int) -> None:
        noted.append((env_index, f"{type(exc).__name__}: {exc}"))


class Assigned(inline_faults.NowAndThen):
    """Lane n has the faults of `config["cells"][n]`: {"faults": of its first env, "again": of those that replace it}.

    With "leaks" there it leaks at every step from the fifth on. Infos tell in which process it is.
    """

    def __init__(self, context: EnvContext) -> None:
        cell = context["cells"][context.vector_index]
        context.update({"lane": context.vector_index, **cell})
        super().__init__(context)

    def _maybe(self, at: str, answer: Any = None) -> Any:
        if at == "step":
            answer = (*answer[:4], {"pid": os.getpid()})
            if self.context.get("leaks"):
                return troubled.FAULTS["leaks"](answer, self.context)
        return super()._maybe(at, answer)
