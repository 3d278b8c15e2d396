"""Reads the earlier run in a run directory, and checks whether a fleet with the given settings may go on with it.

Every key of the configuration is of one of three kinds:

    FIXED       keys that define the policy; a run with other values is another run
    free        keys that say where, how fast and how long the fleet runs; they may differ each time
    all others  keys that change how the policy is trained; they may differ if the user asks for it with `--resume`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.run.checkpoint_facts import NEWEST_FILE, counts_of
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.run_dir import RUNS, RunDir
from headrace.schemas.basics.run_files import read_regular, regular
from headrace.schemas.errors import RunDirError, is_there
from headrace.schemas.frames.safetensors import LONGEST_HEADER
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import by_key, known_keys

FIXED = frozenset(
    (
        "sampling.env",
        "sampling.env_config",
        "sampling.env_to_module",
        "sampling.module_to_env",
        "sampling.policies",
        "sampling.policy_mapping_fn",
        "module.build",
        "module.config",
    )
)
TRAINING = frozenset(
    (
        "sampling.batch_mode",
        "sampling.count_steps_by",
        "sampling.episode_lookback_horizon",
        "sampling.explore",
        "sampling.max_env_seed",
        "sampling.missing_final_observation",
        "sampling.rollout_fragment_length",
        "sampling.seed",
        "sampling.synchronous",
    )
)
"""Keys of [sampling] that change how the policy is trained. All keys of [learner] do, except `_FREE_OF_LEARNER`."""

_FREE_OF_LEARNER = frozenset(("learner.enabled", "learner.evaluate_every_steps", "learner.torch_threads"))
_SHOWN = 60


@dataclass(frozen=True)
class EarlierRun:
    """A run that has taken steps, or has a checkpoint: its fleet.json, and the settings that it was started with."""

    run_dir: RunDir
    page: FleetFile
    settings: Mapping[str, Any]

    @staticmethod
    def of(run_dir: RunDir) -> EarlierRun | None:
        """Return the run in the directory. None if there is none, or one without steps and checkpoint.

        Raises `RunDirError` when its files are damaged.
        """
        if not is_there(run_dir.fleet_json):
            return None
        page = read_fleet_file(run_dir.fleet_json)
        if not page.env_steps and not is_there(run_dir.path / NEWEST_FILE):
            return None
        return EarlierRun(run_dir, page, _read_settings(run_dir))

    def check(self, config: FleetConfig, *, resume: bool, advice: str = "") -> list[str]:
        """Return the settings of training that differ, as "key: was -> is".

        Raises `RunDirError` for a difference that is not allowed. `advice` replaces its advice about differences.
        """
        changed = dict(_changed(self.settings, config))
        if fixed := [changed[key] for key in changed if key in FIXED]:
            kept = "these cannot change within a run: name another run directory, or none, for a new run"
            raise self._other_settings(fixed, advice or kept)
        training = [changed[key] for key in changed if _is_of_training(key)]
        if training and not resume:
            again = f"go on with the new ones by --resume {self.run_dir.path}, or name no run directory, for a new run"
            raise self._other_settings(training, advice or again)
        return training

    def _other_settings(self, differences: Sequence[str], advice: str) -> RunDirError:
        path = str(self.run_dir.path)
        reason = f"has a run with other settings ({'; '.join(differences)})"
        return RunDirError(path, reason, sentence=f"{path} {reason}; {advice}")

    def in_words(self, steps: int, episodes: int, redis: str) -> str:
        """Return a sentence on where this run goes on from: the checkpoint, Redis and fleet.json."""
        checkpoint = self.run_dir.path / NEWEST_FILE
        facts = read_facts(checkpoint)
        policy = f"{checkpoint.name}: {facts or 'see logs/learner.log'}"
        if not is_there(checkpoint):
            policy = f"no {checkpoint.name}: the learner starts from the beginning"
        best = self.page.best_return
        returns = "no mean return of 100 episodes yet" if best is None else f"best mean return {best:.4g}"
        known = (
            f"{steps:,} env steps and {episodes:,} episodes" if steps else "nothing of this run: counters begin at 0"
        )
        return (
            f"going on with the run in {self.run_dir.path}; {policy}; Redis ({redis}): {known}; fleet.json: {returns}"
        )


def existing_run(run: Path) -> Path:
    """Return the directory of the run that `--resume` names: a path, or a name in `runs/`. Raises `RunDirError`."""
    for path in (run, RUNS / run):
        if is_there(path / "settings.json"):
            return path
    missing = "no settings.json in it" if run.is_dir() or (RUNS / run).is_dir() else "no such folder"
    raise RunDirError(str(run), f"there is {missing}, so no run to go on with", "name another run with --resume")


def write_settings(config: FleetConfig) -> bytes:
    """Return the content of settings.json. It lacks the run directory's path, so that the directory may be moved."""
    moved = config.replaced({"fleet.run_dir": ""})
    return orjson.dumps(moved.model_dump(mode="json"), option=orjson.OPT_INDENT_2)


def read_told(checkpoint: Path) -> dict[str, Any] | None:
    """Return the learner's epoch, position and state from a checkpoint's metadata; None without readable metadata."""
    try:
        with open(checkpoint, "rb", opener=regular) as file:
            length = int.from_bytes(file.read(8), "little")
            header = orjson.loads(file.read(length) if length <= LONGEST_HEADER else b"")
        told = orjson.loads(header["__metadata__"]["headrace"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, dict) else None


def read_facts(checkpoint: Path) -> str | None:
    """Return, in words, the updates and steps of a checkpoint's learner; None if the checkpoint lacks them."""
    told = read_told(checkpoint) or {}
    if "epoch" not in told or "state" not in told:
        return None
    counts = counts_of(told["state"])
    return f"{counts.words(told['epoch'])}, trained on {counts.steps:,} steps"


def _read_settings(run_dir: RunDir) -> Mapping[str, Any]:
    if not is_there(run_dir.settings_json):
        return {}
    try:
        found = orjson.loads(read_regular(run_dir.settings_json))
    except (OSError, orjson.JSONDecodeError) as error:
        raise RunDirError(str(run_dir.path), f"its settings.json cannot be read ({error})") from error
    return found  # type: ignore[no-any-return]


def _changed(before: Mapping[str, Any], config: FleetConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, "key: was -> is") of each setting that differs. A key missing in `before` had its default."""
    if not before:
        return
    known = orjson.loads(orjson.dumps(known_keys())) | by_key(before)
    for key, now in by_key(config.model_dump(mode="json")).items():
        if known[key] != now:
            yield key, f"{key}: {_shown(known[key])} -> {_shown(now)}"


def _is_of_training(key: str) -> bool:
    return key in TRAINING or (key.startswith("learner.") and key not in _FREE_OF_LEARNER)


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
