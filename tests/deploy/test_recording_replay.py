"""`headrace replay`: an episode of a recording as a video, of its own pictures or of an env that plays it again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

from headrace.deploy.annexes.recording.episode_film import film_env, find_episode
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Discrete
from headrace.schemas.errors import ConfigError, EnvError, ExitCode
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.vector_env import VectorEnv
from support.envs.counting import Counting
from support.pipeline.recordings import Played, make_recording
from support.waiting import TIMEOUT_S

CART = {"env": "CartPole-v1", "num_envs": 3, "seed": 4, "rollout_fragment_length": 40}
SCENE = Dict(
    spaces={"arm": Box(shape=(3,), dtype="<f4"), "camera": Box(shape=(32, 48, 3), dtype="|u1", low=0, high=255)}
)


@pytest.fixture
def ffmpeg() -> str:
    reason = "imageio-ffmpeg is not installed; pip install 'headrace[video]'"
    return str(pytest.importorskip("imageio_ffmpeg", reason=reason).get_ffmpeg_exe())


def frames_of(path: Path, ffmpeg: str, height: int, width: int) -> Any:
    command = [ffmpeg, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def sampled(path: Path, config: EnvRunnerConfig, fragments: int = 3) -> Path:
    with SingleAgentEnvRunner(config) as runner, RecordingFolder(path) as folder:
        for _ in range(fragments):
            batch = runner.sample_fragment()
            assert isinstance(batch, ChunkBatch)
            folder.write([batch], [])
    return path


def replayed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", "replay", "recording", "--render", "out.mp4", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=folder)


def test_recorded_pictures_become_a_video(tmp_path: Path, ffmpeg: str) -> None:
    episodes = [Played(7), Played(4, ChunkEnd.ABORTED), Played(5, ChunkEnd.TRUNCATED)]
    make_recording(tmp_path / "recording", (SCENE, Discrete(n=2)), *episodes)
    totals = [episode.columns["rewards"].sum() for episode in episodes]
    for arguments, number in (
        (["--episode", "best"], 0 if totals[0] > totals[2] else 2),
        (["--episode", "worst"], 2 if totals[0] > totals[2] else 0),
        (["--episode", episodes[1].id], 1),
    ):
        told = replayed(tmp_path, *arguments, "--fps", "5")
        own = episodes[number]
        assert told.stdout.startswith(f"out.mp4: {own.steps + 1} pictures of episode {own.id} ({own.steps} steps"), told
        means = frames_of(tmp_path / "out.mp4", ffmpeg, 32, 48).mean((1, 2))
        np.testing.assert_allclose(means, own.columns["obs/camera"].mean((1, 2)), atol=6)


def test_the_env_plays_the_episode_again(tmp_path: Path, ffmpeg: str) -> None:
    recording = sampled(tmp_path / "recording", EnvRunnerConfig(**CART))
    told = replayed(tmp_path, "--env", "CartPole-v1")
    (pictures, steps) = re.findall(r"(\d+) (?:pictures|steps)", told.stdout)
    assert int(pictures) == int(steps) + 1, told.stderr
    episode, _ = find_episode(str(recording), "best")
    assert (len(episode), episode.end) == (int(steps), ChunkEnd.TERMINATED)
    frames = frames_of(tmp_path / "out.mp4", ffmpeg, 400, 600)
    assert len(frames) == int(pictures)
    # The cart is black, and 600 pixels show 4.8 units.
    rows = (frames[:, 288:296].mean(-1) < 60).any(1)
    middles = np.array([np.flatnonzero(row).mean() for row in rows])
    np.testing.assert_allclose(middles, 300 + 125 * episode.obs[:, 0], atol=6)


class Departing(Counting):
    """A counting env whose rewards of the second life of the process differ, with pictures."""

    bonus = 0.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.render_mode = config.get("render_mode")

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, reward + (self.bonus if self.t == 4 else 0.0), *rest

    def render(self) -> Any:
        return np.zeros((32, 48, 3), np.uint8)


@pytest.mark.usefixtures("ffmpeg")
def test_an_env_that_departs_from_the_recording_gives_no_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvRunnerConfig(env=f"{__name__}:Departing", num_envs=2, rollout_fragment_length=40, seed=1)
    recording = sampled(tmp_path / "recording", config.model_copy(update={"env": Departing}))
    episode, spaces = find_episode(str(recording), "best")
    config = config.model_copy(update={"env": Departing})
    assert film_env(episode, spaces, config, tmp_path / "out.mp4") == len(episode) + 1
    (tmp_path / "out.mp4").unlink()
    monkeypatch.setattr(Departing, "bonus", 0.5)
    with pytest.raises(EnvError, match=r"the env departs from the recording at step 4 \(reward .*\): it is another"):
        film_env(episode, spaces, config, tmp_path / "out.mp4")
    monkeypatch.setattr(Departing, "bonus", 0.0)
    monkeypatch.setattr(Departing, "render", lambda self: None)
    with pytest.raises(EnvError, match="the env gives no picture"):
        film_env(episode, spaces, config, tmp_path / "out.mp4")
    assert [path.name for path in tmp_path.iterdir()] == ["recording"]


def vector_of_departing(context: Any) -> VectorEnv:
    return VectorEnv.wrap(lambda index: Departing(context.at(index)), num_envs=context.num_envs)


@pytest.mark.usefixtures("ffmpeg")
def test_an_env_of_a_users_own_vector_is_shown(tmp_path: Path) -> None:
    config = EnvRunnerConfig(env=vector_of_departing, num_envs=3, rollout_fragment_length=40, seed=1)
    recording = sampled(tmp_path / "recording", config)
    best, _ = find_episode(str(recording), "best")
    episode, spaces = find_episode(str(recording), f"{best.episode_id[:16]}0002{0:012x}")
    assert episode.env_index == 2
    assert film_env(episode, spaces, config, tmp_path / "out.mp4") == len(episode) + 1


def test_what_cannot_be_shown_is_said_in_a_sentence(tmp_path: Path) -> None:
    assert "recording is no recording" in replayed(tmp_path).stderr
    spaces = Box(shape=(3,), dtype="<f4"), Discrete(n=2)
    recording = str(make_recording(tmp_path / "recording", spaces, Played(5, seed=None), Played(5, skip=0)))
    told = replayed(tmp_path)
    assert told.returncode == ExitCode.CONFIG
    assert "no pictures are recorded; name the env with --env, or its run with --run-dir" in told.stderr
    episode, own = find_episode(recording, "0000000000000007" + "0" * 16)
    with pytest.raises(ConfigError, match="began without a seed, so no env can repeat it"):
        film_env(episode, own, EnvRunnerConfig(**CART), tmp_path / "out.mp4")
    several = EnvRunnerConfig(**{**CART, "policies": ["one", "two"]})
    with pytest.raises(ConfigError, match="an env of several agents shows only recorded pictures"):
        film_env(episode, own, several, tmp_path / "out.mp4")
    for which, words in (
        ("0", "'0' begins the ids of several episodes"),
        ("ff", "has no episode 'ff'; it is best, worst or an id"),
        ("0000000000000007" + "0" * 15 + "1", "the recording lacks steps of episode 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_episode(recording, which)
