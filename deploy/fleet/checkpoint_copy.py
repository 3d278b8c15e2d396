"""The copy of the learner's checkpoint in Redis, so that either the run directory or Redis may be lost.

The learner writes its file and knows nothing of Redis, so Redis can never keep it waiting. The supervisor copies the
newest file, in a thread of its own, as often as the byte budget allows. Before anything else starts it compares the
two, and puts the newer one into the run directory. The supervisor already has the Redis URL. It also copies the
checkpoints of a user's own learner that saves into the run directory.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.broker.redis.blob import ByteBudget, RedisBlob
from headrace.broker.redis.client import REDIS_FAILURES, connect, in_words
from headrace.deploy.report.evidence import settled_by_life
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.run.run_dir import is_locked
from headrace.learner_stub.checkpoints.checkpoint import (
    CHECKPOINT_FILE,
    Checkpoint,
    decode_checkpoint,
    keep_as_previous,
    load_checkpoint,
    previous_path,
)
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.accounts.redis_keys import CHECKPOINT_BLOB, CHECKPOINT_CURRENT
from headrace.schemas.basics.bounds import Natural, Version
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.errors import CheckpointError, writing
from headrace.schemas.settings.config import RedisSection

log = logging.getLogger("headrace.supervisor")

LARGEST_BYTES = 1 << 30
READ_TIMEOUT_S = 2.0
LOOK_S = 0.25
"""Interval at which the copier looks for a new file, and tries again where Redis fails."""
CHECK_S = 10.0
"""Interval at which the copier looks whether Redis still has its copy."""

FINISH_S = 10.0


class AboutCopy(BaseModel):
    """The supervisor's description of a copy, as JSON beside it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """blake2b-128 of the file's bytes."""
    saved_unix_s: Annotated[float, Field(ge=0)] = 0.0
    env_steps: Natural = 0
    """Env steps of the fleet when the copy was made."""


CopyInRedis = tuple[Checkpoint, bytes, AboutCopy]
"""A whole checkpoint that Redis has, its bytes, and what is told of it."""


def copies_in(client: redis.Redis, fleet_id: str) -> RedisBlob:
    """Return access to the copy of one fleet's checkpoint."""
    return RedisBlob(client, fleet_id, CHECKPOINT_CURRENT, CHECKPOINT_BLOB, LARGEST_BYTES)


def version_of(checkpoint: Checkpoint | None) -> Version:
    """Return the version, which is higher for the newer of two checkpoints; (0, 0) for None."""
    return (checkpoint.epoch, checkpoint.saves) if checkpoint is not None else (0, 0)


# -- before a start ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The checkpoint from which a fleet goes on. It is in the run directory."""

    epoch: int = 0
    settled: Mapping[tuple[int, int], Settled] = field(default_factory=dict)
    """Position of its learner in the batches of each life."""
    sentence: str = ""
    """Says which checkpoint it is and why; "" where there is none."""


def choose_checkpoint(path: Path, url: str, fleet_id: str, snapshot: Snapshot | None) -> StartingPoint:
    """Compare the checkpoint at `path` with the copy in Redis, put the newer one at `path`, and return it.

    Reads each one whole. `snapshot` is the ledger with which the fleet goes on. Raises `RunDirError` when the folder
    cannot be written to.
    """
    snapshot, damage = snapshot or Snapshot(), ""
    try:
        local = load_checkpoint(path)
    except (CheckpointError, OSError) as error:
        local, damage = None, str(error)
    copy = _read_copy(url, fleet_id, newer_than=version_of(local))
    name = path.name
    if isinstance(copy, str):
        if local is None:
            return StartingPoint(sentence=f"{damage}; {copy}" if damage else "")
        sentence = f"going on from {name} in the run directory, {_in_words(local)}; {copy}"
        chosen = local
    else:
        chosen, data, about = copy
        with writing(path.parent, "the checkpoint"):
            if local is not None and _is_whole(path):
                keep_as_previous(path)
            replace_private(path, data)
        has = damage or f"the run directory has no {name}"
        if local is not None:
            has = f"{name} in the run directory is older ({_in_words(local)}) and kept as {previous_path(path).name}"
        sentence = f"{has}; going on from the one in Redis, {_in_words(chosen)}, {_written(about, snapshot)}"
    settled = settled_by_life(chosen.position, fleet_id)
    return StartingPoint(chosen.epoch, settled, sentence + _trained_after(settled, snapshot))


def _read_copy(url: str, fleet_id: str, newer_than: Version) -> CopyInRedis | str:
    """Return Redis's copy if it is newer than `newer_than`, else a sentence on what Redis has."""
    client = connect(url, READ_TIMEOUT_S)
    try:
        shelf = copies_in(client, fleet_id)
        version = shelf.version()
        if version is None:
            return "Redis has no copy of one"
        if version <= newer_than:
            return "Redis has the same" if version == newer_than else "the copy in Redis is older"
        stored = shelf.load()
    except REDIS_FAILURES as error:
        return f"the copy in Redis cannot be read ({in_words(error)})"
    finally:
        client.close()
    if stored is None:
        return "the copy in Redis is not whole"
    try:
        about = AboutCopy.model_validate_json(stored.about)
        data = b"".join(stored.frames)
        checkpoint = decode_checkpoint(data, "the checkpoint in Redis")
    except (ValidationError, CheckpointError):
        return "the copy in Redis is no checkpoint"
    if _digest(data) != about.digest or version_of(checkpoint) != stored.version:
        return "the copy in Redis does not match its digest"
    return checkpoint, data, about


def _is_whole(path: Path) -> bool:
    try:
        decode_checkpoint(read_regular(path), str(path))
    except (CheckpointError, OSError):
        return False
    return True


def _in_words(checkpoint: Checkpoint) -> str:
    return f"save {checkpoint.saves:,} of learner epoch {checkpoint.epoch}"


def _written(about: AboutCopy, snapshot: Snapshot) -> str:
    """Return when the copy was written, before the fleet's last report to Redis."""
    if not about.env_steps:  # written by a learner that was started alone, which does not know the env steps
        return time.strftime("written at %Y-%m-%d %H:%M:%S", time.localtime(about.saved_unix_s))
    at = f"at env step {about.env_steps:,}"
    end = snapshot.reported_unix_s
    return at if end is None else f"written {max(0.0, end - about.saved_unix_s):.0f} s before the end, {at}"


def _trained_after(settled: Mapping[tuple[int, int], Settled], snapshot: Snapshot) -> str:
    """Return a part of a sentence on the steps that were committed after the checkpoint was saved; "" for none."""
    steps = sum(
        max(0, row.settled.committed[0] - settled.get(life, Settled()).committed[0])
        for life, row in snapshot.rows.items()
    )
    if not steps:
        return ""
    return f"; {steps:,} steps that the learner took after it stay committed, and no model is trained on them again"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- while the fleet runs ---------------------------------------------------------------------------------------------


@contextmanager
def copied_to_redis(run_dir: Path, section: RedisSection, fleet_id: str) -> Iterator[None]:
    """Within the block, copy the checkpoints of a learner that was started alone and whose config names a Redis.

    First put the newer of both checkpoints into the run directory. Do nothing under a supervisor: it makes the copies.
    """
    if not (section.url and section.bytes_per_hour and fleet_id) or is_locked(run_dir):
        yield
        return
    path = run_dir / CHECKPOINT_FILE
    if sentence := choose_checkpoint(path, section.url, fleet_id, None).sentence:
        log.info("%s", sentence)
    copier = CheckpointCopier(path, section.url, fleet_id, section.bytes_per_hour // 2, lambda: 0)
    try:
        yield
    finally:
        copier.finish()
        copier.join(FINISH_S)


class CheckpointCopier:
    """Copies the checkpoint at `path` to Redis whenever it has changed, as `bytes_per_hour` allows, until `finish`.

    Everything happens in a thread of its own. While Redis fails or refuses, the thread retries, and logs this once.
    `env_steps` is called in that thread, and returns the fleet's env steps.
    """

    def __init__(self, path: Path, url: str, fleet_id: str, bytes_per_hour: int, env_steps: Callable[[], int]) -> None:
        self._path = path
        self._env_steps = env_steps
        self._client = connect(url)
        self._shelf = copies_in(self._client, fleet_id)
        self._budget = ByteBudget(bytes_per_hour)
        self._finishing = threading.Event()
        self._check_at = math.inf
        self._copied: tuple[int, ...] | None = None
        """Identity of the newest file that was looked at and needs no copy any more."""
        self._away = self._told = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-copier", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy the newest checkpoint, even beyond the byte budget, and end the thread. Does not wait."""
        self._finishing.set()

    @property
    def finished(self) -> bool:
        """Return whether the thread has ended."""
        return not self._thread.is_alive()

    def join(self, deadline_s: float) -> None:
        """Wait until the thread has ended, for `deadline_s` at most."""
        self._thread.join(deadline_s)

    # The methods below run in the thread.

    def _run(self) -> None:
        while not self._finishing.wait(LOOK_S):
            if time.monotonic() >= self._budget.due:
                self._try()
        self._try()
        self._client.close()

    def _try(self) -> None:
        try:
            self._look()
        except REDIS_FAILURES as error:
            if not self._away:
                log.warning("the copy of the checkpoint in Redis waits: %s", in_words(error))
            self._away = True

    def _look(self) -> None:
        now = time.monotonic()
        identity = _identity(self._path)
        if identity is None or (identity == self._copied and now < self._check_at):
            return
        if identity == self._copied:
            self._check_at = now + CHECK_S
            if self._shelf.version() is not None:
                return
        if self._copy():
            self._copied, self._check_at, self._away = identity, now + CHECK_S, False

    def _copy(self) -> bool:
        """Copy the file. Return False if the caller must retry."""
        try:
            saved_unix_s, nbytes = self._path.stat().st_mtime, self._path.stat().st_size
            if nbytes > LARGEST_BYTES:
                self._say(f"it has {nbytes:,} bytes, and the limit is {LARGEST_BYTES:,}")
                return True
            data = read_regular(self._path)
            version = version_of(decode_checkpoint(data, str(self._path)))
        except CheckpointError as error:
            self._say(str(error))
            return True
        except OSError:
            return False  # the learner is replacing the file
        about = AboutCopy(digest=_digest(data), saved_unix_s=saved_unix_s, env_steps=self._env_steps())
        told = about.model_dump_json().encode()
        answer = self._shelf.store(version, [data], told, lambda nbytes: self._budget.spend(nbytes, time.monotonic()))
        if answer == "older" and self._shelf.version() != version:
            self._say("Redis has a newer one, which another learner of this fleet saved")
        return answer != "moved"

    def _say(self, why: str) -> None:
        if not self._told:
            log.warning("%s is not copied to Redis: %s", self._path.name, why)
        self._told = True


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file at `path` is replaced; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
