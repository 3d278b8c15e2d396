"""The faults of `troubled`, by envs that live in the worker itself."""

from __future__ import annotations

from typing import Any

from support.envs import troubled


class NowAndThen(troubled.Troubled):
    """Each life of the faulty lane steps well nine times; the fault is its tenth step's."""

    def _maybe(self, at: str, answer: Any = None) -> Any:
        return answer if at == "step" and self._steps != 10 else super()._maybe(at, answer)


def end_children() -> int:
    """Kill what envs have left behind; how many these were."""
    children, troubled._left = troubled._left, []
    for child in children:
        child.kill()
        child.wait()
    return len(children)
