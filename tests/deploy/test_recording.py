"""A recording: what its files hold of batches, and `headrace record` beside a real fleet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

import pyarrow.parquet as pq  # noqa: E402

from headrace.deploy.annexes.recording import exporting  # noqa: E402
from headrace.deploy.annexes.recording.episode_film import find_episode  # noqa: E402
from headrace.deploy.annexes.recording.exporting import ExportTarget, export_recording  # noqa: E402
from headrace.deploy.annexes.recording.recording_folder import METADATA, RecordingFolder, read_metadata  # noqa: E402
from headrace.learner_stub import EpisodeStream  # noqa: E402
from headrace.schemas.chunks.batch import ChunkBatch  # noqa: E402
from headrace.schemas.chunks.chunk import CHUNK_TABLE, UNSEEDED, ChunkEnd  # noqa: E402
from headrace.schemas.chunks.spaces import Box, Dict, Discrete  # noqa: E402
from headrace.schemas.chunks.task import Task  # noqa: E402
from headrace.schemas.errors import ExitCode, RunDirError  # noqa: E402
from support.fleets.running_fleet import RunningFleet  # noqa: E402
from support.waiting import TIMEOUT_S, wait_until  # noqa: E402

IMAGE = Box(shape=(8, 8, 3), dtype="|u1", low=0, high=255)
ARM = Box(shape=(2, 3), dtype="<f4", low=None, high=None)
SCENE = Dict(spaces={"arm": ARM, "camera": IMAGE})


def make_batch(seq: int, *lengths: int, module: str = "default_policy", **changed: Any) -> ChunkBatch:
    """Chunks of these lengths, each of its own env; 0 is the marker of an aborted episode. Values differ."""
    steps, chunks = sum(lengths), len(lengths)
    rows = steps + sum(length > 0 for length in lengths)
    random = np.random.default_rng(seq)
    table = np.zeros(chunks, CHUNK_TABLE)
    table["id_high"], table["id_low"] = seq, range(chunks)
    table["length"], table["env_index"] = lengths, range(chunks)
    table["seed"] = [UNSEEDED if i % 2 else 2**63 + i for i in range(chunks)]
    table["t_start"], table["episode_length"] = 10, 10 + table["length"]
    table["episode_return"] = random.normal(size=chunks)
    table["agent"] = np.arange(chunks) % 2
    table["end"] = [ChunkEnd.TERMINATED if length else ChunkEnd.ABORTED for length in lengths]
    table["reason"] = [0 if length else 1 for length in lengths]
    columns = {
        "obs/arm": random.normal(size=(rows, 2, 3)).astype(np.float32),
        "obs/camera": random.integers(0, 255, (rows, 8, 8, 3), np.uint8),
        "actions": random.integers(0, 2, steps),
        "rewards": random.normal(size=steps),
        "weights_seq": np.full(steps, seq),
        "logp": random.normal(size=steps).astype(np.float32),
        "state_in/h": random.normal(size=(rows - steps, 4)).astype(np.float32),
    }
    given: dict[str, Any] = {"agents": ("left", "right"), "slot": 3, "incarnation": 2, "seq": seq, **changed}
    columns |= given.pop("columns", {})
    return ChunkBatch(table, columns, SCENE, Discrete(n=2), modules=(module,), reasons=("", "env_exception"), **given)


def written(path: Path, *batches: ChunkBatch) -> Path:
    with RecordingFolder(path) as folder:
        folder.write(batches, [])
    return path


def rows_of(path: Path, kind: str, module: str = "default_policy") -> list[dict[str, Any]]:
    tables = [pq.read_table(file) for file in sorted(path.glob(f"**/{kind}-*-{module}.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


def test_each_step_is_a_row_and_each_chunk_has_its_last_observation(tmp_path: Path) -> None:
    batches = [make_batch(1, 3, 0, 2), make_batch(2, 4)]
    steps = rows_of(written(tmp_path, *batches), "steps")
    chunks = rows_of(tmp_path, "chunks")
    assert [len(batch) for batch in batches] == [3, 1]
    assert [row["end"] for row in steps] == [
        *["ONGOING"] * 2,
        "TERMINATED",
        "ONGOING",
        "TERMINATED",
        *["ONGOING"] * 3,
        "TERMINATED",
    ]
    assert [row["t"] for row in steps] == [10, 11, 12, 10, 11, 10, 11, 12, 13]
    assert [row["agent"] for row in steps] == [*["left"] * 5, *["left"] * 4]
    whole = [chunk for batch in batches for chunk in batch if len(chunk)]
    for name in ("arm", "camera"):
        shown = np.concatenate([chunk.obs[name][:-1] for chunk in whole])
        seen = [np.frombuffer(row[f"obs/{name}"], np.uint8) if name == "camera" else row["obs/arm"] for row in steps]
        assert np.array_equal(np.reshape(seen, shown.shape), shown)
    finals = [row["final_obs/arm"] for row in chunks]
    assert finals[1] is None
    assert np.array_equal(np.reshape([f for f in finals if f], (3, 2, 3)), [chunk.obs["arm"][-1] for chunk in whole])
    for name in ("actions", "rewards", "logp", "weights_seq"):
        recorded = [row[name] for row in steps]
        assert np.array_equal(recorded, np.concatenate([batch.arrays[name] for batch in batches])), name
    assert {(row["slot"], row["incarnation"], row["learner_epoch"]) for row in steps} == {(3, 2, 0)}
    assert [row["episode_id"] for row in chunks] == [chunk.episode_id for batch in batches for chunk in batch]


def test_an_aborted_episode_keeps_its_reason_and_an_episode_without_a_seed_has_none(tmp_path: Path) -> None:
    chunks = rows_of(written(tmp_path, make_batch(1, 3, 0, 2)), "chunks")
    assert [(row["end"], row["reason"]) for row in chunks] == [
        ("TERMINATED", None),
        ("ABORTED", "env_exception"),
        ("TERMINATED", None),
    ]
    assert [row["seed"] for row in chunks] == [2**63, None, 2**63 + 2]
    assert chunks[1]["state_in/h"] is None


def test_a_field_says_the_shape_of_its_rows_and_a_file_its_schema_and_spaces(tmp_path: Path) -> None:
    (file,) = written(tmp_path, make_batch(1, 3)).glob("**/steps-*")
    schema = pq.read_schema(file)
    assert schema.field("obs/arm").metadata == {b"shape": b"[2,3]", b"dtype": b"<f4"}
    assert schema.field("obs/arm").type == pa.list_(pa.float32(), 6)
    assert schema.field("obs/camera").type == pa.binary(192)
    told = json.loads(schema.metadata[METADATA])
    assert (told["schema"], told["module"]) == (2, "default_policy")
    assert told["observation_space"] == SCENE.model_dump(mode="json")


def test_modules_have_files_of_their_own_and_so_has_a_column_of_another_form(tmp_path: Path) -> None:
    wide = {"logp": np.zeros((2, 2), np.float32)}
    batches = [make_batch(1, 2), make_batch(2, 2, module="a/b"), make_batch(3, 2, columns=wide), make_batch(4, 1)]
    written(tmp_path, *batches)
    assert sorted(path.name for path in tmp_path.glob("**/steps-*")) == [
        "steps-000001-a%2Fb.parquet",
        "steps-000001-default_policy+1.parquet",
        "steps-000001-default_policy.parquet",
    ]
    assert [row["weights_seq"] for row in rows_of(tmp_path, "steps")] == [1, 1, 4]


def test_a_column_that_some_batches_lack_is_null_for_them(tmp_path: Path) -> None:
    random = make_batch(1, 2)
    del random.arrays["logp"]
    steps = rows_of(written(tmp_path, random, make_batch(2, 1), random), "steps")
    assert [row["logp"] is None for row in steps] == [True, True, False, True, True]


def test_tasks_lookback_and_infos_stand_with_their_chunks(tmp_path: Path) -> None:
    back = {"lookback/rewards": np.array([0.5, 0.25]), "lookback/obs/arm": np.ones((2, 2, 3), np.float32)}
    tasks = {"tasks": [Task((1, 4), {"level": 3})], "task_of": np.array([0, 1], np.int32)}
    batch = make_batch(1, 1, 2, columns=back, infos={1: {2: {"won": True}}}, **tasks)
    batch.table["lookback"] = [0, 2]
    chunks = rows_of(written(tmp_path, batch), "chunks")
    assert [row["lookback/rewards"] for row in chunks] == [[], [0.5, 0.25]]
    assert chunks[1]["lookback/obs/arm"] == [[1.0] * 6] * 2
    assert [row["infos"] for row in chunks] == [None, '{"2":{"won":true}}']
    task = {"version": [1, 4], "values": {"level": 3}, "group": None, "member": 0}
    assert [row["task"] and json.loads(row["task"]) for row in chunks] == [None, task]
    assert [row["task"] is None for row in rows_of(tmp_path, "steps")] == [True, False, False]


def test_a_kill_before_the_last_file_of_a_number_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordingFolder(tmp_path) as folder:
        folder.write([make_batch(1, 3)], [{"slot": 1}])
        write = folder._write
        monkeypatch.setattr(
            folder, "_write", lambda name, *rest: write(name, *rest) if "batches" not in name else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            folder.write([make_batch(2, 2)], [{"slot": 2}])
    (tmp_path / "unmerged" / ".steps-000002-default_policy.parquet.77").write_bytes(b"half")
    assert len(list(tmp_path.glob("**/steps-*"))) == 2
    with RecordingFolder(tmp_path) as folder:
        assert (folder.number, folder.position) == (1, [{"slot": 1}])
        assert sorted(path.name for path in (tmp_path / "unmerged").iterdir()) == [
            "batches-000001.parquet",
            "chunks-000001-default_policy.parquet",
            "steps-000001-default_policy.parquet",
        ]
        folder.write([make_batch(2, 2)], [{"slot": 2}])
    assert [row["weights_seq"] for row in rows_of(tmp_path, "steps")] == [1, 1, 1, 2, 2]


def test_two_processes_do_not_record_to_one_folder(tmp_path: Path) -> None:
    with (
        RecordingFolder(tmp_path),
        pytest.raises(RunDirError, match=r"another process records to it; choose another --dir"),
    ):
        RecordingFolder(tmp_path)
    RecordingFolder(tmp_path).close()


@pytest.mark.parametrize(
    ("schema", "told"), [(1, "it has schema 1"), (9, "it has schema 9"), (None, "it has no schema")]
)
def test_a_recording_of_another_layout_is_refused_by_all_that_open_it_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: int | None, told: str
) -> None:
    monkeypatch.setattr(exporting, "TARGETS", {"any": ExportTarget("builtins:print", ())})
    path = written(tmp_path / "recording", make_batch(1, 3))
    with EpisodeStream.of(path) as stream:
        assert stream.next() is not None
        position = stream.position()
    for file in path.rglob("*.parquet"):
        table = pq.read_table(file)
        metadata = {} if schema is None else {METADATA: json.dumps({"schema": schema, "position": []})}
        pq.write_table(table.replace_schema_metadata(metadata), file)
    before = {file: file.read_bytes() for file in path.rglob("*.parquet")}
    opened: list[Callable[[], object]] = [
        lambda: RecordingFolder(path),
        lambda: EpisodeStream.of(path),
        lambda: EpisodeStream.of(path, position=position),
        lambda: EpisodeStream.of(path, keep=lambda episode: True),
        lambda: find_episode(str(path), "best"),
        lambda: export_recording(str(path), "any", tmp_path / "out", module_id=None, fps=None),
    ]
    for entrance in opened:
        with pytest.raises(RunDirError, match=f"{told}, and this Headrace reads schema 2; use the version that wrote"):
            entrance()
    assert {file: file.read_bytes() for file in path.rglob("*.parquet")} == before


def test_a_damaged_recording_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "batches-000002.parquet").write_bytes(b"PAR1")
    for entrance in (RecordingFolder, EpisodeStream.of):
        with pytest.raises(RunDirError, match=r"batches-000002.parquet cannot be read: .*; choose another --dir"):
            entrance(tmp_path)


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    """They look as what a kill leaves, but for their names."""
    others = [tmp_path / name for name in ("trips-2024.parquet", ".part-0.parquet.crc")]
    for other in others:
        other.write_bytes(b"theirs")
    written(tmp_path, make_batch(1, 3))
    assert [other.read_bytes() for other in others] == [b"theirs"] * 2


def _record(run_dir: Path, folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace.deploy", "record", str(run_dir), "--dir", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.processes
def test_headrace_record_that_waits_for_its_fleet_ends_in_order_at_sigterm(tmp_path: Path) -> None:
    waiting = _record(tmp_path / "run", tmp_path / "recording")
    try:
        assert waiting.stderr is not None
        assert "waiting for it" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGTERM)
        _, errors = waiting.communicate(timeout=TIMEOUT_S)
    finally:
        waiting.kill()
    assert waiting.returncode == 0, errors


@pytest.mark.processes
def test_headrace_record_has_each_step_of_a_fleet_once_over_a_restart(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "recording"
    words = ("--env", "CartPole-v1", "--workers", "1", "--set", "broker.consumer_groups.record=wait")
    with RunningFleet(run_dir, *words, "--until-steps", "20000", "--no-dashboard") as fleet:
        first = _record(run_dir, folder)
        try:
            fleet.wait_until(lambda: fleet.steps() > 2_000, "steps")
            first.send_signal(signal.SIGTERM)
            said, errors = first.communicate(timeout=TIMEOUT_S)
            assert first.returncode == 0, errors
            assert " steps in " in said
            wait_until(lambda: list(folder.glob("**/batches-*")), "a file")
            later = _record(run_dir, folder)
            _, errors = later.communicate(timeout=TIMEOUT_S)
            assert later.returncode == 0, errors
        finally:
            first.kill()
        fleet.finish()
    ledger = fleet.audited()["groups"]["record"]["ledger"]
    steps = [(row["episode_id"], row["t"]) for row in rows_of(folder, "steps")]
    assert len(steps) == len(set(steps)) == ledger["committed"][0] == ledger["stepped"]
    assert read_metadata(max(folder.glob("batches-*")))["position"]


@pytest.mark.processes
def test_headrace_up_records_each_step_that_is_committed_over_a_kill_of_its_recorder(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "recording"
    words = ("--env", "CartPole-v1", "--workers", "2", "--until-steps", "20000", "--no-dashboard")
    with RunningFleet(run_dir, *words, "--record", str(folder)) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 2_000, "steps")
        pid = fleet.pid("recorder")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert fleet.finish()["returncode"] == 0
    ledger = fleet.audited()["groups"]["record"]["ledger"]
    steps = [(row["episode_id"], row["t"]) for row in rows_of(folder, "steps")]
    assert len(steps) == len(set(steps)) == ledger["committed"][0] == ledger["stepped"]
    assert [path.parent for path in folder.rglob("batches-*")] == [folder]


@pytest.mark.parametrize(
    "words",
    [
        ["record", "runs/none", "--dir", "recording"],
        ["up", "--env", "CartPole-v1", "--run-dir", "run", "--record", "recording"],
        ["replay", "old", "--render", "best.mp4"],
        ["export", "old", "--to", "any", "--out", "out"],
    ],
    ids=lambda words: words[0],
)
def test_without_pyarrow_a_command_says_what_to_install_and_does_nothing(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "batches-000001.parquet").touch()
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['pyarrow'] = None\n"
        "from headrace.deploy.annexes.recording import exporting\n"
        "exporting.TARGETS = {'any': exporting.ExportTarget('builtins:print', ())}\n"
    )
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "headrace.deploy", *words]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert told.returncode == ExitCode.CONFIG
    assert told.stderr.splitlines() == ["error: a recording needs pyarrow: pip install 'headrace[record]'"]
    assert sorted(tmp_path.rglob("*")) == before
