"""A recording of each release is read by today's code, and today's code gives its columns the same names and types."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

import golden_recordings
import pyarrow.parquet as pq

import headrace
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.deploy.annexes.recording.row_reader import episode_table
from headrace.learner_stub import EpisodeStream
from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.schemas.chunks.spaces import leaf_values, leaves

RECORDED = sorted(golden_recordings.FOLDER.glob("recording_*.tar.xz"))


@pytest.fixture(params=RECORDED, ids=lambda path: path.name)
def record(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of an archive that was unpacked."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_this_version_has_a_recording() -> None:
    assert golden_recordings.path_of(headrace.__version__) in RECORDED


def test_a_recording_of_a_release_gives_its_episodes_equal_to_the_bit(record: Path) -> None:
    chunks: dict[tuple[str, str], list[EpisodeChunk]] = {}
    with EpisodeStream.of(record / "recording") as stream:
        spaces = stream.module_spaces()
        for chunk in (chunk for batch in stream for chunk in batch):
            chunks.setdefault((chunk.module_id, chunk.episode_id), []).append(chunk)
    table = episode_table(record / "recording").to_pylist()
    rows = {(row["module"], row["episode_id"]): row for row in table}
    read = []
    for (module, _), parts in chunks.items():
        episode, columns = to_episode(parts), dict[str, Any](rewards=None)
        columns["rewards"] = episode.rewards
        for root, space, values in (
            ("obs", spaces[module].observation, episode.obs),
            ("actions", spaces[module].action, episode.actions),
        ):
            names = [name for name, _ in leaves(space, root)]
            columns |= dict(zip(names, leaf_values(space, values), strict=True))
        task = None if episode.task is None else episode.task.values
        facts = {"seed": episode.seed, "end": episode.end.name, "task": task, "steps": len(episode)}
        read.append(golden_recordings.told(columns, episode_id=episode.episode_id, module=module, **facts))
        row = rows[module, episode.episode_id]
        assert row["episode_return"] == episode.episode_return == pytest.approx(episode.rewards.sum())
        assert (row["episode_length"], row["end"]) == (len(episode), episode.end.name)
    key = ("module", "episode_id")
    expected = orjson.loads((record / "expected.json").read_bytes())
    assert sorted(read, key=lambda one: [one[name] for name in key]) == sorted(
        expected, key=lambda one: [one[name] for name in key]
    )


def test_its_batches_have_the_same_columns_when_they_are_recorded_today(record: Path) -> None:
    with EpisodeStream.of(record / "recording") as stream, RecordingFolder(record / "again") as folder:
        folder.write([*stream], [])
    assert forms_in(record / "again") == forms_in(record / "recording")


def forms_in(recording: Path) -> dict[str, dict[str, tuple[str, Any]]]:
    """Return the type and the metadata of each column, by kind of file and module."""
    forms: dict[str, dict[str, tuple[str, Any]]] = {}
    for path in recording.rglob("*.parquet"):
        kind, _, module = path.stem.partition("-")
        own = forms.setdefault(f"{kind} {module.partition('-')[2]}", {})
        own |= {field.name: (str(field.type), field.metadata) for field in pq.read_schema(path)}
    return forms
