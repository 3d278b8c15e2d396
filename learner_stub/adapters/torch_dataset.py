"""A stream as a dataset of torch, for `DataLoader`, training frameworks that take one, and plain loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.learner_stub.streaming.stream import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConfigError

log = logging.getLogger("headrace.learner")

_ONE_READER = (
    "a stream has one reader, this process, because the fleet hands each batch to one learner; give "
    "DataLoader(num_workers=0). ZeroMQ's own threads receive the next batches while you train"
)


def transition_tensors(batch: ChunkBatch) -> Any:
    """Return `batch.transitions()` as tensors."""
    return to_torch(batch.transitions())


class EpisodeDataset(IterableDataset[Any]):
    """An iterable dataset of `view(batch)` for each batch of `stream`: by default its transitions, as writable tensors.

        for steps in DataLoader(EpisodeDataset(stream), batch_size=None):
            train(module, steps)

    It ends as a loop over the stream does. Batches without steps, which tell of the ends of episodes, are left out. The
    stream's own rules hold: asking for the next item commits those before, or you call `stream.commit()` once
    `LearnerState.save(stream, ...)` has saved all of them. No batch is divided, so a position never falls within one.

    Raises `ConfigError` in a worker process of a `DataLoader`. Nothing is taken from the stream then.
    """

    def __init__(self, stream: EpisodeStream, view: Callable[[ChunkBatch], Any] = transition_tensors) -> None:
        self._stream, self._view = stream, view

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError(_ONE_READER, key="num_workers")
        if self._stream.ended:
            log.warning("the dataset has no more items: %s", self._stream.ended)
        return (self._view(batch) for batch in self._stream if batch.steps)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(_ONE_READER, key="num_workers")
