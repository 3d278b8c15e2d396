"""run_dir/lifetime.json: counters, sums and env failures of earlier lives, for an empty Redis. Mode 0600.

Redis has them too, and its values are the newer ones. The reporter's thread writes the file when they have changed, and
pauses after each write by its size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.broker.redis.parser import HashParser
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.logged_metrics import SumsOfLife
from headrace.schemas.accounts.runner_counters import Counters
from headrace.schemas.basics.run_files import replace_private

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 1.0
_BYTES_PER_S = 100_000
"""A pause is so long that the file takes no more of the disk, and of this process, in the long run."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The content of the file, as Redis has it under the keys of these names; `env_errors` is `errors` there."""

    runner_state: Mapping[int, Counters] = field(default_factory=dict)
    metric_sums: Mapping[str, SumsOfLife] = field(default_factory=dict)
    env_errors: Mapping[str, EnvErrorRow] = field(default_factory=dict)


class LifetimeFile:
    """The file of one fleet. One thread at a time."""

    def __init__(self, run_dir: Path, fleet_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir / "lifetime.json"
        self._fleet_id = fleet_id
        self._clock = clock
        self._written = b""
        self._not_before = clock()

    def read(self) -> Lifetime:
        """Return the content of the file; empty if there is none. Log and leave out what cannot be read."""
        try:
            found: Any = orjson.loads(self._path.read_bytes())
            if found["fleet_id"] != self._fleet_id:
                raise ValueError(f"it is of fleet {found['fleet_id']!r}")
            hashes = [
                {name.encode(): orjson.dumps(value) for name, value in found[kind].items()}
                for kind in ("runner_state", "metric_sums", "env_errors")
            ]
        except FileNotFoundError:
            return Lifetime()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("%s cannot be used (%s); what it had is known from Redis only", self._path, error)
            return Lifetime()
        values = HashParser()
        lifetime = Lifetime(values.runner_state(hashes[0]), values.metric_sums(hashes[1]), values.env_errors(hashes[2]))
        for sentence in values.garbage:
            log.error("left out a value in %s: %s", self._path.name, sentence)
        return lifetime

    def write(
        self,
        runner_state: Mapping[int, Counters],
        metric_sums: Mapping[str, SumsOfLife],
        env_errors: Mapping[str, Mapping[str, object]],
        *,
        last: bool = False,
    ) -> None:
        """Replace the file if anything has changed and its pause is over, or if this is the `last` write.

        Raises `OSError`.
        """
        now = self._clock()
        if now < self._not_before and not last:
            return
        content = {
            "fleet_id": self._fleet_id,
            "runner_state": runner_state,
            "metric_sums": {name: life.model_dump() for name, life in metric_sums.items()},
            "env_errors": env_errors,
        }
        text = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
        self._not_before = now + max(SHORTEST_PAUSE_S, len(text) / _BYTES_PER_S)
        if text != self._written:
            replace_private(self._path, text)
            self._written = text
