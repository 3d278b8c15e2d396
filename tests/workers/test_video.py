"""Videos of episodes, by gymnasium's own recorder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.schemas.errors import EnvError
from support.envs.toy import check_books, runner
from support.runners.closing import close_within

RECORDED = "headrace.workers.envs.video:recorded"


def _chunks(env: str, env_config: dict[str, Any], **settings: Any) -> list[Any]:
    with runner(env, env_config=env_config, num_envs=2, **settings) as sampler:
        chunks = sampler.sample(num_episodes=10, random_actions=True)
        check_books(sampler)
        assert sampler.totals.env_failures == 0
    return [(chunk.episode_id, chunk.obs.tobytes(), chunk.actions.tobytes(), chunk.seed) for chunk in chunks]


STAND_IN = """
import json

class ImageSequenceClip:
    def __init__(self, frames, fps):
        (shape,) = {frame.shape for frame in frames}
        self.told = [" ".join(map(str, shape)), len(frames)]

    def write_videofile(self, path, logger):
        with open(path, "w") as file:
            json.dump(self.told, file)
"""


@pytest.fixture(params=["moviepy", "a stand-in"])
def moviepy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What encodes: the real one where it is installed, or one that writes how many pictures of which shape it got."""
    if request.param == "moviepy":
        pytest.importorskip("moviepy", reason="moviepy is not installed; pip install 'headrace[video]'")
    else:
        (package := tmp_path / "path" / "moviepy" / "video" / "io").mkdir(parents=True)
        (package / "ImageSequenceClip.py").write_text(STAND_IN)
        monkeypatch.syspath_prepend(str(tmp_path / "path"))
        for name in [name for name in sys.modules if name.split(".")[0] == "moviepy"]:
            monkeypatch.delitem(sys.modules, name)
    return str(request.param)


@pytest.mark.long
@pytest.mark.parametrize("placement", ["inline", "process"])
def test_recording_some_episodes_of_one_env_leaves_chunks_unchanged(
    tmp_path: Path, placement: str, moviepy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_within(monkeypatch, 30.0)  # the last video is written then
    folder = tmp_path / "videos"
    recording = {"env": "CartPole-v1", "folder": str(folder), "every": 2, "length": 8}
    found = _chunks(RECORDED, recording, env_placement=placement, envs_per_process=2)
    assert found == _chunks("CartPole-v1", {})
    (life,) = folder.iterdir()
    assert life.name.startswith("worker-0-env-0-")
    videos = sorted(life.iterdir())
    assert sorted(video.name for video in videos)[:2] == ["video-episode-0.mp4", "video-episode-2.mp4"]
    if moviepy == "moviepy":
        assert all(b"ftyp" in video.read_bytes()[:16] for video in videos), "they are MP4 files"
        return
    pictures = [orjson.loads(video.read_bytes()) for video in videos]
    assert {shape for shape, _ in pictures} == {"400 600 3"}
    assert pictures[0][1] == max(count for _, count in pictures) == 9, "of the reset and of 8 steps"


def test_workers_and_envs_that_are_not_to_be_recorded_need_no_recorder(tmp_path: Path) -> None:
    recording = {"env": "CartPole-v1", "folder": str(tmp_path), "workers": [1]}
    assert _chunks(RECORDED, recording) == _chunks("CartPole-v1", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recording", "words"),
    [
        ({"env": "CartPole-v1", "evrey": 2}, "evrey"),
        ({"folder": "videos"}, "env"),
        ({"env": "support.envs.toy:make_counting"}, "incompatible with RecordVideo"),
    ],
)
def test_an_env_that_cannot_be_recorded_raises_env_error(recording: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=rf"could not be built: .*(?s:.*){words}"):
        runner(RECORDED, env_config=recording)
