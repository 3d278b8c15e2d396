"""The failures of envs that can be repeated: RUN_DIR/failures/SLOT-INCARNATION-NUMBER.failure, a file each.

The worker writes them on its own host, so the newest of a fleet on several hosts may lie in several folders. A file is
of the safetensors format (`schemas/frames/safetensors.py`). Its metadata "failure" is JSON: what was built, reset and
sent. It names no code that is then built: the settings of the run do.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel

from headrace.schemas.basics.bounds import Natural
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.chunks.task import TaskJson
from headrace.schemas.errors import ConfigError, DecodeError, RunDirError, is_there
from headrace.schemas.frames.safetensors import decode_safetensors, encode_safetensors

FOLDER = "failures"
MOST_FILES = 100
"""The most failures of a folder; see `_remove_oldest`."""
MOST_BYTES = 256 << 20
"""The most bytes of a folder's failures. One failure has an eighth of it at the most."""
_SUFFIX = ".failure"
_METADATA = "failure"
_NAME = re.compile(r"\d+-\d+-\d+")


class FailureFacts(BaseModel):
    """The env that was built, the reset it got, and its error."""

    env: str
    env_config: dict[str, Any]
    worker_index: Natural
    num_workers: Natural
    num_envs: Natural
    lane: Natural
    recreated: bool
    making_seeds: tuple[int | None, int | None]
    """`context.seed` of the lane's creator, and that of the whole vector if it is a user's own."""
    seed: int | None
    """Seed of the episode's reset."""
    task: TaskJson | None
    steps: Natural
    problem: str
    at: str
    error: str
    message: str

    @property
    def episode_id(self) -> str:
        """The id of the episode; "" for a failure before its first step."""
        return self.at.partition(" of episode ")[2]


@dataclass(frozen=True, slots=True)
class KeptFailure:
    """A failure that was read, and the arrays that repeat its episode; see `FailedEpisode`."""

    name: str
    facts: FailureFacts
    arrays: Mapping[str, NDArray[Any]]


def write_failure(run_dir: Path, kept: KeptFailure, lanes: dict[str, int]) -> str:
    """Write a failure, and return the command that repeats it; "" if it cannot be. Raises `OSError`, `EncodeError`.

    `lanes` has the lane of each failure that the worker's life has written, by name.
    """
    folder, facts, arrays = run_dir / FOLDER, kept.facts, kept.arrays
    if sum(array.nbytes for array in arrays.values()) > MOST_BYTES // 8:
        facts, arrays = facts.model_copy(update={"problem": f"its steps take more than {MOST_BYTES >> 23} MiB"}), {}
    content = b"".join(encode_safetensors(arrays, {_METADATA: facts.model_dump_json()}))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_private(folder / f"{kept.name}{_SUFFIX}", content, sync=False)
    lanes[kept.name] = facts.lane
    _remove_oldest(folder, lanes)
    return "" if facts.problem else rerun_command(run_dir, kept.name)


def rerun_of(run_dir: Path, slots: Container[int] = range(sys.maxsize)) -> str:
    """Return the command that repeats the newest failure of one of these workers in a run directory; "" for none."""
    name = next((name for name in failures_of(run_dir) if int(name.partition("-")[0]) in slots), "")
    return rerun_command(run_dir, name) if name else ""


def rerun_command(run_dir: Path, name: str) -> str:
    """Return the command that repeats a failure."""
    return f"headrace rerun {to_paste(run_dir)} --failure {name}"


def failures_of(run_dir: Path) -> list[str]:
    """Return the names of the failures in a run directory, the newest first."""
    return [path.stem for _, path in _newest_first(run_dir / FOLDER)] if is_there(run_dir / FOLDER) else []


def read_failure(run_dir: Path, name: str) -> KeptFailure:
    """Return a failure of a run directory. Raises `RunDirError`, and `ConfigError` for a name of none."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"should be SLOT-INCARNATION-NUMBER, as --list shows them, got {name!r:.80}", key="--failure")
    path = run_dir / FOLDER / f"{name}{_SUFFIX}"
    try:
        arrays, metadata = decode_safetensors(read_regular(path, MOST_BYTES))
        facts = FailureFacts.model_validate_json(metadata[_METADATA])
    except FileNotFoundError:
        raise ConfigError(f"there is no failure {name} in {run_dir}; --list shows them", key="--failure") from None
    except (OSError, DecodeError, KeyError, ValueError) as error:
        raise RunDirError(str(path), f"the failure cannot be read: {error!s:.200}", "take another one") from error
    return KeptFailure(name, facts, arrays)


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Return (bytes, path) of each failure, the newest first."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        if _NAME.fullmatch(path.stem) is None:
            continue
        with suppress(OSError):  # another worker has removed it
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    return [(size, path) for _, size, path in sorted(found, reverse=True)]


def _remove_oldest(folder: Path, lanes: dict[str, int]) -> None:
    """Remove what is beyond the bounds: each time the oldest failure of the env that has the most. The newest stays.

    So an env that fails all the time does not drive out the one failure of another. Failures that other lives of
    workers wrote count as those of one env for each worker.
    """
    all_found = _newest_first(folder)  # none where someone has emptied the folder
    total, found = sum(size for size, _ in all_found), all_found[1:]
    while len(found) >= MOST_FILES or (found and total > MOST_BYTES):
        envs = [(path.stem.partition("-")[0], lanes.get(path.stem)) for _, path in found]
        taken: Counter[tuple[str, int | None]] = Counter()
        for env, (size, _) in zip(envs, found, strict=True):
            taken[env] += size if total > MOST_BYTES else 1
        most = max(taken.values())
        size, path = found.pop(max(at for at, env in enumerate(envs) if taken[env] == most))
        total -= size
        path.unlink(missing_ok=True)
    for name in lanes.keys() - {path.stem for _, path in (*all_found[:1], *found)}:
        del lanes[name]
