"""`headrace export` of a recording: datasets that their own libraries load, and refusals of what cannot be exported."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

from headrace.deploy.annexes.recording import exporting
from headrace.deploy.annexes.recording.exporting import TARGETS, ExportTarget, export_recording
from headrace.deploy.annexes.recording.whole_episodes import WholeEpisodes
from headrace.learner_stub import EpisodeStream
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from headrace.schemas.errors import ConfigError, ExitCode, ModuleError, RunDirError
from support.pipeline.recordings import Played, make_recording
from support.waiting import TIMEOUT_S

ARM = Box(shape=(3,), dtype="<f4", low=-1.0, high=1.0)
PICTURE = Box(shape=(32, 48, 3), dtype="|u1", low=0, high=255)
SPACES: dict[str, tuple[Space, Space]] = {
    "box": (ARM, ARM),
    "discrete": (ARM, Discrete(n=3)),
    "discrete observation": (Discrete(n=5), Discrete(n=3, start=-1)),
    "multi discrete": (ARM, MultiDiscrete(nvec=(2, 5), start=(0, 0), shape=(2,))),
    "picture": (PICTURE, Discrete(n=2)),
    "nested": (
        Dict(spaces={"arm": ARM, "more": Tuple(spaces=(Discrete(n=4), PICTURE, Box(shape=(2, 2), dtype="<f8")))}),
        Dict(spaces={"grip": Discrete(n=2), "move": ARM}),
    ),
}


def played() -> list[Played]:
    """Episodes of all ends, some shorter than a chunk. Those from the fourth on are left out."""
    return [
        Played(7, ChunkEnd.TERMINATED, seed=2**63 - 1, task={"level": 3, "name": "a"}),
        Played(2, ChunkEnd.TRUNCATED, seed=None, agent="right"),
        Played(6, ChunkEnd.TRUNCATED, seed=5),
        Played(4, ChunkEnd.ABORTED),
        Played(5, ChunkEnd.ONGOING),
        Played(7, skip=0),
        Played(7, skip=1),
    ]


NEEDS_LEROBOT = (
    "lerobot 0.4 wants torch 2.10, datasets 4 and setuptools 80, which are older than ours; in its own environment:"
    " pip install -e '.[record,lerobot]' hypothesis pytest pytest-timeout"
)
LEFT_OUT = "3 episodes of 15 steps; left out: 1 aborted, 1 not ended, 2 with steps missing"


def record(path: Path, kind: str) -> tuple[Path, dict[str, Played]]:
    """A recording, and its whole episodes in the order in which they end."""
    episodes = played()
    make_recording(path / "recording", SPACES[kind], *episodes)
    return path / "recording", {episodes[number].id: episodes[number] for number in (1, 2, 0)}


def export(recording: Path, to: str, out: Path, **options: Any) -> str:
    return export_recording(str(recording), to, out, **({"module_id": None, "fps": None} | options))


def columns_of(tree: Any, name: str) -> dict[str, Any]:
    """Arrays nested in dicts and tuples, as columns."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple) else None
    if items is None:
        return {name: tree}
    return {key: column for part, own in items for key, column in columns_of(own, f"{name}/{part}").items()}


def check_same(found: dict[str, Any], episode: Played) -> None:
    for name, column in episode.columns.items():
        assert (found[name].dtype, found[name].shape) == (column.dtype, column.shape), name
        np.testing.assert_array_equal(found[name], column, name)


def test_episodes_are_joined_of_chunks_among_others(tmp_path: Path) -> None:
    recording, whole = record(tmp_path, "nested")
    with EpisodeStream.of(recording) as stream:
        episodes = WholeEpisodes(stream, "default_policy")
        for chunk, (own_id, own) in zip(episodes, whole.items(), strict=True):
            assert (chunk.episode_id, chunk.end, chunk.seed) == (own_id, own.end, own.seed)
            check_same(
                {**columns_of(chunk.obs, "obs"), **columns_of(chunk.actions, "actions"), "rewards": chunk.rewards}, own
            )
    assert episodes.in_words() == LEFT_OUT


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SPACES)
def test_minari_loads_the_episodes(tmp_path: Path, kind: str) -> None:
    minari = pytest.importorskip("minari", reason="pip install 'headrace[minari]'")
    pytest.importorskip("h5py", reason="pip install 'headrace[minari]'")
    recording, whole = record(tmp_path, kind)
    out = tmp_path / "mine-v0"
    assert export(recording, "minari", out) == f"{out}: {LEFT_OUT}"
    dataset = minari.MinariDataset(out / "data")
    assert (dataset.spec.dataset_id, dataset.total_episodes, dataset.total_steps) == ("mine-v0", 3, 15)
    assert (dataset.observation_space, dataset.action_space) == tuple(map(to_gym, SPACES[kind]))
    told = list(dataset.storage.get_episode_metadata(range(3)))
    for loaded, metadata, (own_id, own) in zip(dataset.iterate_episodes(), told, whole.items(), strict=True):
        found = {**columns_of(loaded.observations, "obs"), **columns_of(loaded.actions, "actions")}
        check_same({**found, "rewards": loaded.rewards}, own)
        last = [False] * (own.steps - 1)
        assert loaded.terminations.tolist() == [*last, own.end is ChunkEnd.TERMINATED]
        assert loaded.truncations.tolist() == [*last, own.end is ChunkEnd.TRUNCATED]
        assert (metadata.get("seed"), metadata["episode_id"], metadata["agent"]) == (own.seed, own_id, own.agent)
        assert metadata.get("task") == ('{"level":3,"name":"a"}' if own.task else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-v0", "recording"]


@pytest.mark.thorough
def test_minari_refuses_names_that_it_cannot_hold(tmp_path: Path) -> None:
    pytest.importorskip("minari", reason="pip install 'headrace[minari]'")
    slashed = Dict(spaces={"a/b": ARM})
    recording = make_recording(tmp_path / "recording", (slashed, ARM), Played(3))
    with pytest.raises(ConfigError, match="minari cannot hold the name 'a/b', which has a slash"):
        export(recording, "minari", tmp_path / "mine-v0")
    for name in ("mine", "a b-v0"):
        with pytest.raises(ConfigError, match=f"--out: minari wants a name such as cartpole-v0, got '{name}'"):
            export(recording, "minari", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SPACES)
def test_datasets_loads_a_row_for_each_step(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'headrace[hf]'")
    recording, whole = record(tmp_path, kind)
    assert export(recording, "hf", tmp_path / "out") == f"{tmp_path / 'out'}: {LEFT_OUT}"
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(loaded) == 15
    for own_id, own in whole.items():
        mine = loaded.select([i for i, episode_id in enumerate(loaded["episode_id"]) if episode_id == own_id])
        found = {name: list(mine[name]) for name in mine.column_names}
        finals = [values for name, values in found.items() if name.startswith("final")]
        for values in finals:
            assert [value is None for value in values] == [*[True] * (own.steps - 1), False]
        columns = {}
        for name, column in own.columns.items():
            root, slash, rest = name.partition("/")
            hf = {"obs": "observation", "actions": "action", "rewards": "reward"}[root] + slash + rest
            values = found[hf] + ([found[f"final_{hf}"][-1]] if root == "obs" else [])
            columns[name] = np.stack([np.asarray(value, column.dtype) for value in values])
        check_same(columns, own)
        last = [False] * (own.steps - 1)
        assert found["terminated"] == [*last, own.end is ChunkEnd.TERMINATED]
        assert found["truncated"] == [*last, own.end is ChunkEnd.TRUNCATED]
        assert (found["seed"][-1], found["agent"][-1], found["t"]) == (own.seed, own.agent, list(range(own.steps)))
        assert found["task"][0] == ('{"level":3,"name":"a"}' if own.task else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recording"]


@pytest.mark.thorough
def test_datasets_refuses_shapes_that_it_cannot_hold(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="pip install 'headrace[hf]'")
    recording = make_recording(tmp_path / "recording", (Box(shape=(0,), dtype="<f4"), ARM), Played(3))
    with pytest.raises(ConfigError, match=r"hf cannot hold 'observation' of shape \(0,\)"):
        export(recording, "hf", tmp_path / "out")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # lerobot calls what numpy and torchvision deprecate
@pytest.mark.parametrize("kind", SPACES)
def test_lerobot_loads_frames_and_videos(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("lerobot", reason=NEEDS_LEROBOT)
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    recording, whole = record(tmp_path, kind)
    assert export(recording, "lerobot", tmp_path / "out", fps=20) == f"{tmp_path / 'out'}: {LEFT_OUT}"
    loaded = LeRobotDataset("out", root=tmp_path / "out", video_backend="pyav")
    assert (loaded.fps, loaded.num_episodes, loaded.num_frames) == (20, 3, 15)
    rows = [loaded[i] for i in range(15)]
    for number, own in enumerate(whole.values()):
        mine = [row for row in rows if row["episode_index"] == number]
        assert [row["frame_index"].item() for row in mine] == list(range(own.steps))
        assert [round(row["timestamp"].item() * 20) for row in mine] == list(range(own.steps))
        last = [False] * (own.steps - 1)
        assert [row["next.done"].item() for row in mine] == [*last, True]
        assert [row["next.truncated"].item() for row in mine] == [*last, own.end is ChunkEnd.TRUNCATED]
        np.testing.assert_allclose([row["next.reward"].item() for row in mine], own.columns["rewards"], rtol=1e-6)
        assert {row["seed"].item() for row in mine} == {-1 if own.seed is None else own.seed}
        assert {row["task"] for row in mine} == {'{"level":3,"name":"a"}' if own.task else "{}"}
        for name, column in own.columns.items():
            if name == "rewards":
                continue
            root, _, rest = name.partition("/")
            picture = column.ndim == 4
            prefix = "action" if root == "actions" else "observation.images" if picture else "observation.state"
            rest = rest.replace("/", ".") or ("main" if picture else "")
            values = [row[prefix + (f".{rest}" if rest else "")].numpy() for row in mine]
            if picture:
                check_pictures(values, column)
            else:
                found = np.stack(values).reshape(own.steps, *column.shape[1:])
                assert found.dtype.kind == column.dtype.kind
                np.testing.assert_allclose(found, column[: own.steps], rtol=1e-6, err_msg=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recording"]


def check_pictures(values: list[Any], column: Any) -> None:
    """Each frame of the video is nearer to the picture of its step than to those of the others."""
    pictures = column[: len(values)].astype(np.float64).transpose(0, 3, 1, 2) / 255
    for step, value in enumerate(values):
        assert value.shape == pictures[step].shape
        assert np.argmin([np.abs(value - picture).mean() for picture in pictures]) == step


@pytest.mark.thorough
@pytest.mark.parametrize("to", TARGETS)
def test_a_recording_without_a_whole_episode_leaves_nothing(tmp_path: Path, to: str) -> None:
    if any(find_spec(package) is None for package in TARGETS[to].packages):
        pytest.skip(NEEDS_LEROBOT if to == "lerobot" else f"pip install 'headrace[{to}]'")
    recording = make_recording(
        tmp_path / "recording", SPACES["picture"], Played(3, ChunkEnd.ABORTED), Played(7, skip=1)
    )
    with pytest.raises(ConfigError, match=r"there is no whole episode to export: .* 1 aborted, 1 with steps missing"):
        export(recording, to, tmp_path / "mine-v0")
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A target "any" that needs nothing, and the ids that it was given."""
    monkeypatch.setattr(exporting, "TARGETS", {"any": ExportTarget(f"{__name__}:note", ())})
    monkeypatch.setattr(exporting, "resolve_name", lambda name: note)
    seen.clear()
    return seen


seen: list[str] = []


def note(episodes: Any, spaces: Any, folder: Path) -> None:
    folder.mkdir()
    seen.extend(episode.episode_id for episode in episodes)


def test_an_export_of_several_modules_names_one(tmp_path: Path, any_target: list[str]) -> None:
    recording = make_recording(tmp_path / "recording", SPACES["box"], Played(3), module="one")
    make_recording(tmp_path / "recording", SPACES["picture"], Played(2), Played(4), module="two")
    with pytest.raises(ModuleError, match=r"no module was named.*one.*two"):
        export(recording, "any", tmp_path / "out")
    assert export(recording, "any", tmp_path / "out", module_id="two").endswith("out: 2 episodes of 6 steps")
    assert len(any_target) == 2


def test_what_cannot_be_exported_is_refused(tmp_path: Path, any_target: list[str]) -> None:
    recording = make_recording(tmp_path / "recording", SPACES["box"], Played(3, ChunkEnd.ABORTED))
    (tmp_path / "there").mkdir()
    refused = [
        ((recording, "rlds", tmp_path / "out"), {}, r"'rlds' is neither a format for recordings \(any\) nor"),
        ((recording, "any", tmp_path / "there"), {}, "--out: .*there exists already"),
        ((recording, "any", None), {}, "--out: names the folder to make"),
        ((recording, "any", tmp_path / "out"), {"fps": 20}, "--fps: is not for any"),
        ((recording, "any", tmp_path / "out"), {}, "no whole episode to export: 0 episodes of 0 steps; left out: 1 ab"),
    ]
    for given, options, sentence in refused:
        with pytest.raises(ConfigError, match=sentence):
            export(*given, **options)
    with pytest.raises(RunDirError, match="nowhere is no recording: it has no file batches-N"):
        export(tmp_path / "nowhere", "any", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recording", "there"]


def test_a_missing_package_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = make_recording(tmp_path / "recording", SPACES["discrete"], Played(3))
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigError, match=r"export to minari needs minari: pip install 'headrace\[record,minari\]'"):
        export(recording, "minari", tmp_path / "mine-v0")
    command = [sys.executable, "-m", "headrace.deploy", "export", str(recording), "--to", "rlds", "--out", "out"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=tmp_path)
    assert (told.returncode, told.stdout) == (ExitCode.CONFIG, "")
    known = ", ".join(TARGETS)
    assert told.stderr.strip().endswith(
        f"--to: 'rlds' is neither a format for recordings ({known}) nor a file of a policy"
    )


def test_a_long_export_tells_how_far_it_is(
    tmp_path: Path, any_target: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporting, "_PROGRESS_S", 0.0)
    recording = make_recording(tmp_path / "recording", SPACES["box"], Played(3), Played(4))
    with caplog.at_level("INFO", "headrace.deploy"):
        export(recording, "any", tmp_path / "out")
    assert caplog.messages == ["1 episodes of 3 steps so far", "2 episodes of 7 steps so far"]
