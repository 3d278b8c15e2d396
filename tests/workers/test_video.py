"""Videos of episodes, by gymnasium's own recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import EnvError
from support.envs.toy import check_books, runner

RECORDED = "headrace.workers.envs.video:recorded"


def _chunks(env: str, env_config: dict[str, Any], **settings: Any) -> list[Any]:
    with runner(env, env_config=env_config, num_envs=2, **settings) as sampler:
        chunks = sampler.sample(num_episodes=10, random_actions=True)
        check_books(sampler)
        assert sampler.totals.env_failures == 0
    return [(chunk.episode_id, chunk.obs.tobytes(), chunk.actions.tobytes(), chunk.seed) for chunk in chunks]


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_some_episodes_of_one_env_are_recorded_and_chunks_are_as_without(tmp_path: Path, placement: str) -> None:
    pytest.importorskip("moviepy", reason="moviepy is not installed; pip install 'headrace[video]'")
    recording = {"env": "CartPole-v1", "folder": str(tmp_path), "every": 2, "length": 8}
    found = _chunks(RECORDED, recording, env_placement=placement, envs_per_process=2, env_close_timeout_s=30.0)
    assert found == _chunks("CartPole-v1", {})
    (life,) = tmp_path.iterdir()
    assert life.name.startswith("worker-0-env-0-")
    videos = sorted(life.iterdir())
    assert sorted(video.name for video in videos)[:2] == ["video-episode-0.mp4", "video-episode-2.mp4"]
    assert all(b"ftyp" in video.read_bytes()[:16] for video in videos), "they are MP4 files"


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
def test_what_cannot_be_recorded_is_a_typed_error(recording: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvError, match=rf"could not be built: .*(?s:.*){words}"):
        runner(RECORDED, env_config=recording)
