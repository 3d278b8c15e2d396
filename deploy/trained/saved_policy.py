"""A trained policy: found in a run directory, a learner's checkpoint or Redis, with the settings it was trained with.

The settings name code that is built: env, module, connectors. Only `settings_for` decides which settings to trust:
the file beside the checkpoint, or another file that the caller names, overridden by the caller's single settings.
`run/named_code.py` decides which code a file beside the checkpoint may name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from headrace.broker.redis.blob import weights_in
from headrace.broker.redis.client import REDIS_FAILURES, connect, unusable
from headrace.deploy.run.checkpoint_facts import BEST_FILE, NEWEST_FILE, counts_of, mean_return_of
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.named_code import with_found
from headrace.deploy.run.options import Asked, named_redis
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.errors import (
    CheckpointError,
    ConfigError,
    ConnectorError,
    DecodeError,
    HeadraceError,
    ModuleError,
    RunDirError,
    is_there,
)
from headrace.schemas.frames.wire import decode
from headrace.schemas.messages.weights import read_weights, split_modules
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.redis_url import current_url, without_password

if TYPE_CHECKING:  # torch takes a second or two
    from headrace.workers.trained.trained_policy import TrainedPolicy

log = logging.getLogger("headrace.deploy")

Which = Literal["newest", "best"]
"""Name of a checkpoint in a run directory: the newest, or the best so far."""

_FILES: dict[Which, str] = {"newest": NEWEST_FILE, "best": BEST_FILE}
_READ_TIMEOUT_S = 10.0
_ADVICE = "name a run directory, a learner.checkpoint, or redis://HOST:PORT with --fleet-id"


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """Published weights and connector state. `source` tells people where they come from."""

    arrays: Mapping[str, NDArray[Any]]
    version: Version
    """(learner epoch, seq) in Redis; for a checkpoint, which knows no seq, its epoch and count of updates."""
    source: str

    @property
    def modules(self) -> list[str]:
        """Return the names of the modules, in order."""
        by_module = split_modules(self.arrays) if self.arrays else None
        return [DEFAULT_MODULE_ID] if by_module is None else sorted(by_module)


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """A policy and its settings. `origin` tells people where the settings come from."""

    saved: SavedPolicy
    config: FleetConfig
    origin: str

    def build_error(self, error: HeadraceError) -> ModuleError:
        """Return the error to raise if the settings' modules do not fit the weights. `error` is the cause."""
        return ModuleError(
            f"{self.saved.source} is of another policy than {self.config.module.build} for "
            f"{self.config.sampling.env} ({error}); name its env and module with --env and --set module.build=..., or "
            "its fleet.toml with --config"
        )


def load_policy(
    run: str | Path,
    *,
    which: Which = "newest",
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    spaces: Any = None,
    fleet_id: str = "",
    seed: int | None = None,
    allow: Sequence[str] = (),
) -> TrainedPolicy:
    """Load a trained policy from a run directory, a checkpoint file, or Redis ("redis://HOST:PORT" with `fleet_id`).

        policy = load_policy("runs/a")
        action = policy.act(observation)

    - which: "newest", or "best" of a run directory.
    - config: the fleet.toml it was trained with; absent: the config.json beside the checkpoint.
    - settings: single settings over those, such as {"sampling.env": "my_envs:make_env"}.
    - spaces: the gymnasium spaces (observation, action) of the env, or a mapping of such pairs by module id. Without
      them the env is built once, to read them.
    - seed: of sampled actions.
    - allow: code that a config.json may name, as "my_pkg:make_env".

    The policy acts on the `sampling.device` of the config. The config names code that is built here: env, module,
    connectors. What a config.json names is built if it is Headrace's own, if your own `headrace up` wrote that file, or
    if you allow or name it.

    Raises `CheckpointError`, `RunDirError`, `RedisUnavailableError`, `ConfigError`, `EnvError`, `ModuleError` and
    `ConnectorError`.
    """
    asked = Asked(Path(config) if config else None, (), settings or {}, allow)
    found = resolve_policy(str(run), asked, fleet_id, which)
    return build_policy(found, spaces, seed)


def build_policy(found: ResolvedPolicy, spaces: Any = None, seed: int | None = None) -> TrainedPolicy:
    """Build a policy that was found; see `load_policy`."""
    from headrace.deploy.trained.policy_spaces import given_spaces, spaces_of_env
    from headrace.workers.config import runner_config
    from headrace.workers.trained.trained_policy import TrainedPolicy

    own = runner_config(found.config)
    by_module, agents = spaces_of_env(own) if spaces is None else given_spaces(own, spaces)
    saved = found.saved
    try:
        return TrainedPolicy(
            own, by_module, saved.arrays, agents=agents, source=saved.source, version=saved.version, seed=seed
        )
    except (ModuleError, ConnectorError) as error:
        raise found.build_error(error) from error


def resolve_policy(where: str, asked: Asked, fleet_id: str = "", which: Which = "newest") -> ResolvedPolicy:
    """Find the policy at `where` and the settings to build it. The module's docstring says which settings are trusted.

    Raises what `find_policy` and `settings_for` raise, and `ConfigError` if the settings lack a policy at `where`.
    """
    asked = settings_for(where, asked)
    saved = find_policy(where, fleet_id or asked.settings.fleet.fleet_id, which)
    _check_policies(saved, asked.settings)
    config = asked.settings.replaced({"fleet.run_dir": ""})  # it may be of another machine, or have a fleet's sockets
    return ResolvedPolicy(saved, config, asked.origin)


def settings_for(where: str, asked: Asked) -> Asked:
    """Return the settings for the policy at `where`: by default, those in the file beside it.

    Raises `ConfigError`, also for code that a file beside the policy names and `allow` does not.
    """
    return with_found(asked, _config_beside(where) if asked.config is None else None)


def find_policy(where: str, fleet_id: str, which: Which = "newest") -> SavedPolicy:
    """Find a policy at `where`: a folder, a file, or a Redis URL, in which `fleet_id` names the fleet.

    In a run directory the newest is the reference learner's checkpoint, else what the fleet's Redis has. Raises
    `CheckpointError`, `RunDirError`, `RedisUnavailableError`, and `ConfigError` for a Redis without a fleet.
    """
    if which not in _FILES:
        raise ConfigError(f"should be one of {', '.join(_FILES)}, got {which!r:.80}", key="which")
    where = _address(where)
    in_dir = "://" not in where and is_there(Path(where)) and Path(where).is_dir()
    path = Path(where) / _FILES[which] if in_dir else Path(where)
    if which == "best" and not in_dir:
        raise CheckpointError(without_password(where), "only a run directory has a best checkpoint", _ADVICE)
    if which == "best" and not is_there(path):
        reason = "there is none yet: it is kept from the first evaluation on, or from 100 episodes on"
        raise CheckpointError(str(path), reason, "train longer, or take the newest")
    if "://" in where:
        found = _of_redis(where, fleet_id)
    elif not in_dir or which == "best" or is_there(path) or is_there(path.with_name(f"{path.name}.previous")):
        found = _of_file(path)
    else:
        found = _of_run_dir(Path(where))
    return found


def _address(where: str) -> str:
    """Return the Redis URL in the file `where` if its name ends in ".url"; else `where`. Raises `ConfigError`."""
    return current_url(named_redis(where, where)) if where.endswith(".url") else where


def _config_beside(where: str) -> Path | None:
    """Return the configuration beside the checkpoint at `where`, which `headrace up` writes; None without one."""
    if "://" in _address(where):
        return None
    path = Path(where)
    config = (path if is_there(path) and path.is_dir() else path.parent) / "config.json"
    return config if is_there(config) else None


def _check_policies(policy: SavedPolicy, config: FleetConfig) -> None:
    """Raise `ConfigError` if the settings lack a module of `policy`. Warn of modules without weights."""
    named = sorted(config.sampling.policies or [DEFAULT_MODULE_ID])
    if len(named) == 1 and policy.modules == [DEFAULT_MODULE_ID]:
        return  # the only policy's weights may lack its name, as those that a publisher takes
    if not set(policy.modules) <= set(named):
        raise ConfigError(
            f"{policy.source} has {_policies(policy.modules)}, and the settings name {_policies(named)}; give those "
            "it was trained with, by --config or --set",
            key="sampling.policies",
        )
    if frozen := sorted(set(named) - set(policy.modules)):
        log.warning("%s has no weights of %s: they act as they are built", policy.source, _policies(frozen))


def _policies(ids: list[str]) -> str:
    return "one policy without a name" if ids == [DEFAULT_MODULE_ID] else f"the policies {ids!r:.300}"


def _of_file(path: Path) -> SavedPolicy:
    from headrace.learner_stub.checkpoints.checkpoint import (  # torch takes a second or two
        load_checkpoint,
        published_arrays,
    )

    try:
        saved = load_checkpoint(path)
    except (OSError, RunDirError) as error:
        cause = error.__cause__ if isinstance(error, RunDirError) else error
        raise CheckpointError(str(path), getattr(cause, "strerror", None) or str(error), _ADVICE) from error
    except CheckpointError as error:
        raise CheckpointError(error.path, error.reason, _ADVICE) from error
    if saved is None:
        raise CheckpointError(str(path), "it does not exist", _ADVICE)
    counts = counts_of(saved.state)
    facts = [counts.words(saved.epoch), f"{counts.steps:,} steps"]
    if (mean := mean_return_of(saved.state)) is not None:
        facts.append(f"mean return {mean:.2f}")
    source = f"{path} ({', '.join(facts)})"
    return SavedPolicy(published_arrays(saved.arrays), (saved.epoch, counts.updates), source)


def _of_run_dir(folder: Path) -> SavedPolicy:
    path = folder / NEWEST_FILE
    if not is_there(folder / "fleet.json"):
        raise CheckpointError(str(path), "there is none, and there is no fleet.json", _ADVICE)
    fleet = read_fleet_file(folder / "fleet.json")
    if not fleet.redis_url:
        raise CheckpointError(str(path), "there is none, and the fleet has no Redis", _ADVICE)
    advice = (
        f"there is no {NEWEST_FILE} in {folder}, which a learner of your own saves by LearnerState or save_policy, so "
        "only Redis has the weights: while it evaluates, keep the fleet running by headrace up --resume "
        f"{to_paste(folder)}"
    )
    return _of_redis(fleet.redis_url, fleet.fleet_id, advice)


def _of_redis(url: str, fleet_id: str, advice: str = "start it, or correct its address") -> SavedPolicy:
    shown = without_password(url)
    if not fleet_id:
        raise ConfigError("name the fleet whose policy to serve: Redis may have several fleets", key="--fleet-id")
    client = connect(url, _READ_TIMEOUT_S)
    try:
        stored = weights_in(client, fleet_id).load()
    except REDIS_FAILURES as error:
        raise unusable(url, error, _READ_TIMEOUT_S, advice) from error
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
