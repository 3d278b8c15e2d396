"""The export of a recording to a dataset of another library: one row of a table for each target."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from headrace.deploy.annexes.recording import check_pyarrow
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.errors import ConfigError, RunDirError, is_there, writing
from headrace.schemas.settings.plugins import check_package

if TYPE_CHECKING:
    from headrace.deploy.annexes.recording.whole_episodes import WholeEpisodes

log = logging.getLogger("headrace.deploy")

_PROGRESS_S = 5.0


class ExportTarget(NamedTuple):
    """A target: its writer, and the packages that the writer needs, which the extra of the target's name brings.

    The writer is called with the episodes, their spaces, the folder to make, and frames per second where `has_fps`. It
    reads each episode once. It raises `ConfigError` for spaces that the target cannot hold.
    """

    writer: str
    packages: tuple[str, ...]
    has_fps: bool = False


TARGETS: Mapping[str, ExportTarget] = {
    "minari": ExportTarget("headrace.deploy.annexes.recording.minari_dataset:write", ("minari", "h5py")),
    "hf": ExportTarget("headrace.deploy.annexes.recording.hf_dataset:write", ("datasets", "PIL")),
    "lerobot": ExportTarget("headrace.deploy.annexes.recording.lerobot_dataset:write", ("lerobot",), has_fps=True),
}


def export_recording(recording: str, to: str, out: Path | None, *, module_id: str | None, fps: int | None) -> str:
    """Write the whole episodes of a recording to the folder `out`, which appears complete. Return the result in words.

    Raises `ConfigError`, `RunDirError` and `ModuleError`.
    """
    target = TARGETS.get(to)
    if target is None:
        known = ", ".join(TARGETS)
        raise ConfigError(f"{to!r:.80} is neither a format for recordings ({known}) nor a file of a policy", key="--to")
    if fps is not None and not target.has_fps:
        raise ConfigError(f"is not for {to}, which has no time", key="--fps")
    if out is None or is_there(out) or out.is_symlink():
        raise ConfigError("names the folder to make" if out is None else f"{out} exists already", key="--out")
    for package in target.packages:
        check_package(f"the export to {to}", package, f"record,{to}", key="--to")
    check_recording(recording)
    return _write(recording, target, out, module_id, fps)


def check_recording(recording: str) -> None:
    """Raise `RunDirError` for a folder without a complete file of a recording, and `ConfigError` without pyarrow."""
    check_pyarrow()
    if not (is_there(Path(recording)) and any(Path(recording).glob("**/batches-*.parquet"))):
        raise RunDirError("", "", sentence=f"{recording} is no recording: it has no file batches-N.parquet")


def _write(recording: str, target: ExportTarget, out: Path, module_id: str | None, fps: int | None) -> str:
    from headrace.deploy.annexes.recording.whole_episodes import WholeEpisodes
    from headrace.learner_stub import EpisodeStream

    write = resolve_name(target.writer)
    with EpisodeStream.of(recording) as stream:
        spaces = stream.spaces(module_id)
        (name,) = [module_id] if module_id is not None else stream.module_spaces()
        episodes = WholeEpisodes(stream, name)
        options = {} if not target.has_fps else {"fps": fps or 30}
        with writing(out), _aside(out) as folder:
            write(_with_progress(episodes), spaces, folder, **options)
    return f"{out}: {episodes.in_words()}"


def _with_progress(episodes: WholeEpisodes) -> Iterator[EpisodeChunk]:
    say_at = time.monotonic() + _PROGRESS_S
    for episode in episodes:
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + _PROGRESS_S
            log.info("%s so far", episodes.in_words())
        yield episode
    if not episodes.taken:
        raise ConfigError(f"there is no whole episode to export: {episodes.in_words()}")


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """Yield a path of the same name in a folder of its own. What is there becomes `out` if no error comes."""
    beside = out.absolute().with_name(f".{out.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside / out.name
        (beside / out.name).rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
