"""The learner's side: a stream of episode chunks, a publisher of weights, a merger of connectors, and a reference PPO.

Names are loaded on first use, so that a learner that only reads the stream need not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.learner_stub.adapters.torch_dataset import StreamDataset as StreamDataset
    from headrace.learner_stub.checkpoints.learner_state import LearnerState as LearnerState
    from headrace.learner_stub.checkpoints.learner_state import LoadedState as LoadedState
    from headrace.learner_stub.checkpoints.learner_state import save_policy as save_policy
    from headrace.learner_stub.publishing.publisher import WeightPublisher as WeightPublisher
    from headrace.learner_stub.publishing.task_publisher import TaskPublisher as TaskPublisher
    from headrace.learner_stub.rollouts.connector_merger import ConnectorMerger as ConnectorMerger
    from headrace.learner_stub.rollouts.minibatches import minibatches as minibatches
    from headrace.learner_stub.rollouts.own_logp import with_own_logp as with_own_logp
    from headrace.learner_stub.rollouts.returns import Returns as Returns
    from headrace.learner_stub.rollouts.returns import gae as gae
    from headrace.learner_stub.rollouts.returns import vtrace as vtrace
    from headrace.learner_stub.rollouts.tensors import to_torch as to_torch
    from headrace.learner_stub.streaming.stream import EpisodeStream as EpisodeStream
    from headrace.schemas.chunks.episodes import episodes_of as episodes_of
    from headrace.schemas.chunks.task import spread as spread

_HOMES = {
    "ConnectorMerger": "headrace.learner_stub.rollouts.connector_merger",
    "EpisodeStream": "headrace.learner_stub.streaming.stream",
    "LearnerState": "headrace.learner_stub.checkpoints.learner_state",
    "LoadedState": "headrace.learner_stub.checkpoints.learner_state",
    "Returns": "headrace.learner_stub.rollouts.returns",
    "StreamDataset": "headrace.learner_stub.adapters.torch_dataset",
    "TaskPublisher": "headrace.learner_stub.publishing.task_publisher",
    "WeightPublisher": "headrace.learner_stub.publishing.publisher",
    "episodes_of": "headrace.schemas.chunks.episodes",
    "gae": "headrace.learner_stub.rollouts.returns",
    "minibatches": "headrace.learner_stub.rollouts.minibatches",
    "save_policy": "headrace.learner_stub.checkpoints.learner_state",
    "spread": "headrace.schemas.chunks.task",
    "to_torch": "headrace.learner_stub.rollouts.tensors",
    "vtrace": "headrace.learner_stub.rollouts.returns",
    "with_own_logp": "headrace.learner_stub.rollouts.own_logp",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
