"""Writes the failures of envs of one life of a worker, each with the episode that can be repeated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import UNSEEDED
from headrace.schemas.errors import EncodeError
from headrace.workers.envs.failures import Failure, in_its_env
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.reruns.episode_trail import FailedEpisode, Trail
from headrace.workers.reruns.failure_files import FailureFacts, KeptFailure, write_failure

log = logging.getLogger(__name__)

_LENIENT = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class KeptFailures:
    """The failures of one life of a worker, which it writes to `run_dir`. Where it cannot, it logs that once."""

    def __init__(self, run_dir: Path, slot: int, incarnation: int) -> None:
        self.trail = Trail()
        self._run_dir = run_dir.absolute()
        self._life = f"{slot}-{incarnation}"
        self._count = 0
        self._lanes: dict[str, int] = {}
        self._vector_seed: int | None = None
        self._has_failed = False

    def write(self, table: LaneTable, failure: Failure) -> str:
        """Write the failure, if it is of an env, and return the command that repeats it; "" for none."""
        if self._vector_seed is None and 0 in table.contexts:
            self._vector_seed = table.contexts[0].seed  # no env was rebuilt yet
        facts = facts_of(table, failure, self._vector_seed)
        return self.put(facts, failure.episode.arrays if failure.episode is not None else {}) if facts else ""

    def put(self, facts: FailureFacts, arrays: Mapping[str, NDArray[Any]]) -> str:
        """Write a failure, and return the command that repeats it; "" where it cannot be written, or repeated."""
        self._count += 1
        name = f"{self._life}-{self._count}"
        try:
            return write_failure(self._run_dir, KeptFailure(name, facts, arrays), self._lanes)
        except (OSError, EncodeError) as error:
            if not self._has_failed:
                log.warning("failures of envs cannot be kept in %s: %s", self._run_dir, error)
            self._has_failed = True
            return ""


def facts_of(table: LaneTable, failure: Failure, vector_seed: int | None) -> FailureFacts | None:
    """Return what is known of a failure that the lane's env caused alone, with an episode that can be repeated."""
    config, begun, episode = table.config, failure.unbegun, failure.episode
    if not failure.is_of_env or (episode is None and failure.at.startswith("step")):
        return None
    if episode is None:
        episode = FailedEpisode(begun.seed if begun is not None else UNSEEDED, 0)
    own = table.contexts.get(failure.lane)
    if own is None and 0 in table.contexts:  # that of a vector, for all its envs
        own = table.contexts[0].at(failure.lane)
    task = failure.task or (begun.task if begun is not None else None)
    error, message = in_its_env(failure.error)
    return FailureFacts(
        env=str(config.env),
        env_config=orjson.loads(orjson.dumps(config.env_config, default=repr, option=_LENIENT)),
        worker_index=table.worker_index,
        num_workers=config.num_workers,
        num_envs=config.num_envs,
        lane=failure.lane,
        recreated=own is not None and own.recreated,
        making_seeds=(None if own is None else own.seed, vector_seed),
        seed=None if episode.seed == UNSEEDED else episode.seed,
        task=task.as_json() if task is not None else None,
        steps=episode.steps,
        problem=episode.problem,
        at=failure.at,
        error=error,
        message=message,
    )
