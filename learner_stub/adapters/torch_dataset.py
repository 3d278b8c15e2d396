"""A stream as a dataset of torch, for `DataLoader`, training frameworks that take one, and plain loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.fleet_place import Where, as_list, find_fleet, recorded_kind
from headrace.learner_stub.link.ranks import chosen_rank
from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.learner_stub.streaming.stream import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConfigError

log = logging.getLogger("headrace.learner")

_ONE_READER = (
    "a stream has one reader, this process; give DataLoader(num_workers=0), since ZeroMQ's own threads receive the "
    "next batches of a fleet while you train, or for worker processes a StreamDataset(PLACE) of the fleet or recording"
)
_OPEN = (
    "StreamDataset opens its streams itself: give it the run directory, the rendezvous or the recording. A stream that "
    "is open goes to EpisodeDataset(stream): from headrace.learner_stub.adapters.torch_dataset import EpisodeDataset"
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


_PREFETCHED = 2
"""Items that a `DataLoader` asks of each worker process ahead of those that its user has, unless it is told another."""


class StreamDataset(IterableDataset[Any]):
    """An iterable dataset of `convert(batch)` for each batch at `where`, read in a loader's processes.

    `where` is a fleet, as for `EpisodeStream.of`, or a recording. Each loop over a recording begins at its first batch,
    and the worker processes divide its batches, without those that have no steps. What follows is of a fleet.

        dataset = StreamDataset("runs/mine")
        weights = WeightPublisher.of("runs/mine")
        for steps in DataLoader(dataset, batch_size=None, num_workers=2):
            train(module, steps)
            weights.publish(module.state_dict())

    Each worker process is a rank, so all of them get equal numbers of batches. With `rank` and `world_size`, as of
    `EpisodeStream`, the process itself is one of several that have a loader each, with the same `num_workers`. Give
    each item to one step of training: also a batch without steps, which tells of the ends of episodes.

    A batch is settled only after the user has asked the loader for later ones, so that no kill loses any. What the
    loader has prefetched, and the newest items of the user, come again to the next loop: after the death of this
    process or of a worker process, for which torch raises `RuntimeError`, after `break`, and after the end of the loop.

    - convert: by default the transitions as tensors. With `num_workers`, it must be a function that can be pickled.
    - options: those of `EpisodeStream.of`. `commit_lag` must be at least the loader's `prefetch_factor`, times a
      `batch_size`; it is 3, for the usual 2 and one more. `batch_timeout_s` counts at rank 0, whose end is that of all.

    The process that makes the dataset has the `WeightPublisher`, which it opens after it. A stream that told it the
    spaces it closes before both. One loop at a time. With `num_workers=0` the dataset is a stream of this process.

    Raises `ConfigError` for `auto_commit=False`, and for a `position`, from which a second loop would begin again: give
    `EpisodeDataset` a stream then. Raises it for an open stream too.
    """

    def __init__(
        self,
        where: Where | Sequence[Where] = None,
        *,
        convert: Callable[[ChunkBatch], Any] = transition_tensors,
        rank: int | Literal["env"] = 0,
        world_size: int = 1,
        connect_timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        if not options.get("auto_commit", True):
            raise ConfigError("a StreamDataset commits by itself; give EpisodeDataset a stream", key="auto_commit")
        if options.get("position"):
            detail = "each loop goes on after what was committed; give EpisodeDataset a stream with this position"
            raise ConfigError(detail, key="position")
        if hasattr(where, "round_of"):
            raise ConfigError(_OPEN, key="where")
        if isinstance(where, str | Path) and "://" not in str(where):
            where = Path(where).absolute()  # a program may change its working directory
        self._where, self._convert, self._options = where, convert, options
        self._connect_timeout_s = connect_timeout_s
        self._rank, self._world_size = chosen_rank(rank, world_size)
        self._is_recorded = recorded_kind(where) is not None
        if self._is_recorded:
            return
        endpoints = as_list(find_fleet(where, connect_timeout_s, options)[0])
        connection.note_rank(endpoints[0], self._rank)
        self._token = connection.process_token(endpoints)

    def __iter__(self) -> Iterator[Any]:
        loader = get_worker_info()
        if self._is_recorded:
            yield from self._recorded(*((loader.id, loader.num_workers) if loader is not None else (0, 1)))
            return
        rank, ranks, options = self._rank, self._world_size, self._options
        if loader is not None:
            rank, ranks = rank * loader.num_workers + loader.id, ranks * loader.num_workers
            options = {"commit_lag": _PREFETCHED + 1, **options}
        if rank:  # torch asks the others for more once one has ended: more than they keep
            options = {**options, "batch_timeout_s": None}
        endpoint, found = find_fleet(self._where, self._connect_timeout_s, options)
        if rank == 0:
            connection.adopt_token(as_list(endpoint), self._token, publishes_elsewhere=loader is not None)
        with closing(EpisodeStream(endpoint, **found, rank=rank, world_size=ranks)) as stream:
            for batch in stream:
                yield self._convert(batch)

    def _recorded(self, first: int, step: int) -> Iterator[Any]:
        """Yield every `step`th batch of the recording, from the one at `first` on."""
        ranks = {"rank": self._rank, "world_size": self._world_size}
        with EpisodeStream.of(self._where, **ranks, **self._options) as stream:
            yield from (self._convert(batch) for batch in islice(stream, first, None, step) if batch.steps)
