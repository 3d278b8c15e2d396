"""The `headrace` command, which starts, supervises, drains and inspects fleets; and trained policies for programs.

    from headrace.deploy import load_policy

Names are loaded on first use: the command starts faster without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.deploy.trained.saved_policy import load_policy as load_policy
    from headrace.workers.trained.trained_policy import TrainedPolicy as TrainedPolicy

_HOMES = {
    "TrainedPolicy": "headrace.workers.trained.trained_policy",
    "load_policy": "headrace.deploy.trained.saved_policy",
}

__all__ = ["TrainedPolicy", "load_policy"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
