"""The learner's side: a stream of episode chunks, a publisher of weights, a merger of connectors, and a reference PPO.

Names are loaded on first use, so that a learner that only reads the stream need not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.learner_stub.connector_merger import ConnectorMerger as ConnectorMerger
    from headrace.learner_stub.gae import advantages as advantages
    from headrace.learner_stub.learner_state import LearnerState as LearnerState
    from headrace.learner_stub.learner_state import save_policy as save_policy
    from headrace.learner_stub.publisher import WeightPublisher as WeightPublisher
    from headrace.learner_stub.stream import EpisodeStream as EpisodeStream
    from headrace.learner_stub.tensors import to_torch as to_torch
    from headrace.learner_stub.v_trace import vtrace as vtrace

_HOMES = {
    "ConnectorMerger": "headrace.learner_stub.connector_merger",
    "EpisodeStream": "headrace.learner_stub.stream",
    "LearnerState": "headrace.learner_stub.learner_state",
    "WeightPublisher": "headrace.learner_stub.publisher",
    "advantages": "headrace.learner_stub.gae",
    "save_policy": "headrace.learner_stub.learner_state",
    "to_torch": "headrace.learner_stub.tensors",
    "vtrace": "headrace.learner_stub.v_trace",
}

__all__ = [
    "ConnectorMerger",
    "EpisodeStream",
    "LearnerState",
    "WeightPublisher",
    "advantages",
    "save_policy",
    "to_torch",
    "vtrace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
