"""A policy to serve: from a run directory, a learner's checkpoint, or Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.broker.redis_client import REDIS_FAILURES, connect, in_words
from headrace.broker.redis_weights import RedisWeights
from headrace.deploy.fleet_file import read_fleet_file
from headrace.schemas.errors import CheckpointError, ConfigError, DecodeError, RedisUnavailableError
from headrace.schemas.messages import Version
from headrace.schemas.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.redis_keys import without_password
from headrace.schemas.weights import read_weights, split_modules
from headrace.schemas.wire import decode

CHECKPOINT_FILE = "learner.checkpoint"
_READ_TIMEOUT_S = 10.0
_ADVICE = "name a run directory, a learner.checkpoint, or redis://HOST:PORT with --fleet-id"


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """Weights and connector state as they were published. `source` tells people where they come from."""

    arrays: Mapping[str, NDArray[Any]]
    version: Version
    """(learner epoch, seq) in Redis; for a checkpoint, which knows no seq, its epoch and count of updates."""
    source: str

    @property
    def modules(self) -> list[str]:
        """Return the names of the modules, in order."""
        by_module = split_modules(self.arrays) if self.arrays else None
        return [DEFAULT_MODULE_ID] if by_module is None else sorted(by_module)


def find_policy(where: str, fleet_id: str) -> SavedPolicy:
    """Find the newest policy at `where`: a folder, a file, or a Redis URL, in which `fleet_id` names the fleet.

    In a run directory that is the reference learner's checkpoint, else what the fleet's Redis has. Raises
    `CheckpointError`, `RunDirError`, `RedisUnavailableError`, and `ConfigError` for a Redis without a fleet.
    """
    if "://" in where:
        found = _of_redis(where, fleet_id)
    elif not Path(where).is_dir():
        found = _of_file(Path(where))
    elif any((Path(where) / f"{CHECKPOINT_FILE}{suffix}").exists() for suffix in ("", ".previous")):
        found = _of_file(Path(where) / CHECKPOINT_FILE)
    else:
        found = _of_run_dir(Path(where))
    return found


def config_beside(where: str) -> Path | None:
    """Return the configuration beside the checkpoint at `where`, which `headrace up` writes; None without one."""
    if "://" in where:
        return None
    path = Path(where)
    config = (path if path.is_dir() else path.parent) / "config.json"
    return config if config.exists() else None


def _of_file(path: Path) -> SavedPolicy:
    from headrace.learner_stub.checkpoint import load_checkpoint, published_arrays  # torch takes a second or two

    try:
        saved = load_checkpoint(path)
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or str(error), _ADVICE) from error
    except CheckpointError as error:
        raise CheckpointError(error.path, error.reason, _ADVICE) from error
    if saved is None:
        raise CheckpointError(str(path), "there is none", _ADVICE)
    version = saved.epoch, _updates(saved.state)
    source = f"{path} (update {version[1]} of learner epoch {version[0]})"
    return SavedPolicy(published_arrays(saved.arrays), version, source)


def _updates(state: Mapping[str, Any]) -> int:
    """Return the updates of a learner of one policy, or of several, which count together."""
    modules = state.get("modules")
    states = modules.values() if isinstance(modules, dict) else [state]
    counts = [own.get("updates") for own in states if isinstance(own, dict)]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _of_run_dir(folder: Path) -> SavedPolicy:
    if not (folder / "fleet.json").exists():
        raise CheckpointError(str(folder / CHECKPOINT_FILE), "there is none, and there is no fleet.json", _ADVICE)
    fleet = read_fleet_file(folder / "fleet.json")
    if not fleet.redis_url:
        raise CheckpointError(str(folder / CHECKPOINT_FILE), "there is none, and the fleet has no Redis", _ADVICE)
    return _of_redis(fleet.redis_url, fleet.fleet_id)


def _of_redis(url: str, fleet_id: str) -> SavedPolicy:
    shown = without_password(url)
    if not fleet_id:
        raise ConfigError("name the fleet whose policy to serve: Redis may have several fleets", key="--fleet-id")
    client = connect(url, _READ_TIMEOUT_S)
    try:
        stored = RedisWeights(client, fleet_id).load()
    except REDIS_FAILURES as error:
        raise RedisUnavailableError(shown, in_words(error), _READ_TIMEOUT_S) from error
    finally:
        client.close()
    source = f"fleet {fleet_id} in {shown}"
    if stored is None:
        raise CheckpointError(source, "it has no weights", _ADVICE)
    try:
        header, arrays = read_weights(decode(stored.frames))
    except DecodeError as error:
        raise CheckpointError(source, str(error), _ADVICE) from error
    return SavedPolicy(arrays, stored.version, f"{source} (weights {header.version[0]}/{header.version[1]})")
