"""Evaluation: whole episodes, a fixed share for each env, repeatable by seed; and a video of the first episodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import typer

from headrace.deploy.annexes.policies.commands import evaluate
from headrace.deploy.annexes.policies.episode_video import EpisodeVideo
from headrace.deploy.annexes.policies.evaluation import Evaluation, PlaySettings, in_words
from headrace.deploy.run.options import Asked
from headrace.schemas.chunks.task import spread
from headrace.schemas.errors import ConfigError, EnvError, ExitCode
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from headrace.workers import MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.config import runner_config
from support.envs.counting import Counting
from support.envs.tasked import Optioned, Taught
from support.fleets.saved_runs import TWO_CARTS, save_run, save_run_of_two
from support.runners.stand_in_device import stand_in
from support.waiting import TIMEOUT_S, wait_until

NO_RESTART = {"restart_failed_sub_environments": False}


def config_of(env: str, **sampling: Any) -> FleetConfig:
    return build_config({"sampling": {"env": f"{env}", "num_envs": 2, **sampling}})


def weights_of(config: FleetConfig, seed: int = 0) -> dict[str, Any]:
    kind = MultiAgentEnvRunner if config.sampling.is_multi_agent else SingleAgentEnvRunner
    settings = runner_config(config).model_copy(update={"module_config": {"seed": seed}})
    with kind(settings) as runner:
        weights: dict[str, Any] = runner.get_state()["rl_module"]
    return weights


def played(config: FleetConfig, settings: PlaySettings, video: EpisodeVideo | None = None) -> dict[str, Any]:
    with Evaluation(config, settings, video) as evaluation:
        return evaluation.play(weights_of(config), (1, 1), threading.Event()).as_json()


def test_short_episodes_do_not_count_more_often_than_long_ones() -> None:
    config = config_of("support.envs.counting:Counting", env_config={"lengths": {0: 2, 1: 200}})
    told = played(config, PlaySettings(episodes=5))
    assert told["complete"]
    assert told["episodes"] == 5
    assert told["env_steps"] == 3 * 2 + 2 * 200, "the first env has three of five, however soon they end"
    assert told["length"]["mean"] == pytest.approx(406 / 5)
    assert told["return"]["max"] == 200 * 201 / 2
    assert (told["length"]["q25"], told["length"]["median"], told["length"]["q75"]) == (2, 2, 200)
    assert played(config, PlaySettings(episodes=1, num_envs=16))["env_steps"] == 2


def test_a_seed_repeats_its_episodes_with_any_weights_between() -> None:
    config = config_of("CartPole-v1", env_to_module=["headrace.workers.connectors:MeanStd"])
    first, other = weights_of(config), weights_of(config, seed=1)
    never = threading.Event()
    with Evaluation(config, PlaySettings(12, seed=3)) as evaluation:
        scores = [evaluation.play(weights, (1, 1), never).returns for weights in (first, other, first)]
    assert scores[0] == scores[2] != scores[1]
    with Evaluation(config, PlaySettings(12, seed=4)) as evaluation:
        assert evaluation.play(first, (1, 1), never).returns != scores[0]
    with Evaluation(config, PlaySettings(12, seed=3, explore=True)) as evaluation:
        assert evaluation.play(first, (1, 1), never).returns != scores[0]


def test_an_evaluation_on_another_device_plays_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"config": {"vf_share_layers": False, "seed": 3}}  # which torch computes on the CPU too
    told = []
    with stand_in(monkeypatch) as device:
        for place in ("cpu", "cuda"):
            config = build_config({"sampling": {"env": "CartPole-v1", "device": place}, "module": module})
            with Evaluation(config, PlaySettings(6, seed=3)) as evaluation:
                weights = evaluation._runner.get_state()["rl_module"]
                device.take()
                told.append(evaluation.play(weights, (1, 1), threading.Event()).as_json())
        counts = device.take()
    assert told[0] == told[1]
    assert counts.there == counts.back + 1 == counts.waits + 1, "the weights go there, and do not come back"


def test_an_env_that_fails_plays_another_episode_instead() -> None:
    config = config_of("support.envs.counting:Unsound", num_envs=4)
    told = played(config, PlaySettings(episodes=200))
    assert told["episodes"] == 200
    assert told["aborted"] > 0
    share = 100 * told["aborted"] / (200 + told["aborted"])
    assert in_words(told).splitlines()[-1].startswith(f"aborted {told['aborted']} ({share:.2g} %): ")
    assert "aborted" not in in_words({**told, "aborted": 0})
    assert set(np.unique([told["length"]["min"], told["length"]["max"]])) == {3, 7}


def test_a_failure_of_an_env_that_has_played_its_share_is_not_counted_as_aborted() -> None:
    config = config_of("support.envs.counting:Spent", env_config={"lengths": {0: 60}}, env_restart_attempts=1000)
    told = played(config, PlaySettings(episodes=2))
    assert (told["episodes"], told["length"]["min"], told["aborted"]) == (2, 5, 0)


@pytest.mark.thorough
def test_agents_and_policies_have_their_own_returns(tmp_path: Path) -> None:
    save_run_of_two(tmp_path)
    command = [sys.executable, "-m", "headrace.deploy", "evaluate", str(tmp_path), "--episodes", "6"]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    told = orjson.loads(ended.stdout)
    assert told["env"] == TWO_CARTS
    assert told["return_by_agent"] == told["return_by_policy"]
    means = {agent: own["mean"] for agent, own in told["return_by_agent"].items()}
    assert means.keys() == {"short", "long"}
    assert sum(means.values()) == pytest.approx(told["return"]["mean"])
    words = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S).stdout
    assert f"return of policy long   mean {means['long']:.4g}" in words


class Rewarding(Optioned):
    """Gives the level of its task as the reward of each step."""

    def step(self, action: Any) -> Any:
        seen, _, *end = super().step(action)
        return seen, self._level, *end


class RewardingTaught(Taught, Rewarding):
    """Gets its task by `set_task`."""


@pytest.mark.parametrize("env", [Rewarding, RewardingTaught])
@pytest.mark.parametrize("placement", ["inline", pytest.param("process", marks=pytest.mark.processes)])
def test_the_envs_get_the_task_at_each_reset_as_those_of_workers_do(env: Any, placement: str) -> None:
    config = config_of(f"{__name__}:{env.__name__}", env_placement=placement)
    weights, never = weights_of(config), threading.Event()
    tasks: list[Any] = [None, {"level": 3}, {"level": spread(4.0, 8.0, over="envs")}]
    with Evaluation(config, PlaySettings(episodes=4)) as evaluation:
        scores = [evaluation.play(weights, (1, 1), never, task) for task in tasks]
    returns = [sorted(own.returns) for own in scores]
    assert returns == [[-6, -6, -5, -5], [15, 15, 18, 18], [20, 20, 48, 48]], "5 steps in env 0, 6 in env 1"


@pytest.mark.parametrize("env", ["Optioned", "Pair"])
def test_a_task_that_the_env_refuses_ends_the_evaluation_and_is_named(env: str) -> None:
    agents = {"policies": {"one": {}}} if env == "Pair" else {}
    config = config_of(f"support.envs.tasked:{env}", env_config={"refused": 2}, **agents)
    weights, never = weights_of(config), threading.Event()
    with Evaluation(config, PlaySettings(episodes=2)) as evaluation:
        with pytest.raises(EnvError, match=r"refuses the task \{'level': 2\}: .*ValueError: too hard"):
            evaluation.play(weights, (1, 1), never, {"level": 2})
        assert evaluation.play(weights, (1, 1), never, {"level": 1}).complete
    config = config_of(f"support.envs.tasked:{env}", env_config={"refused": 2}, **agents, **NO_RESTART)
    with Evaluation(config, PlaySettings(episodes=2)) as evaluation, pytest.raises(ValueError, match="hard") as refused:
        evaluation.play(weights, (1, 1), never, {"level": 2})
    advice, task = refused.value.__notes__
    assert (advice, task) == (
        "restart_failed_sub_environments = true rebuilds the env and goes on",
        'its task was {"level":2}',
    )


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("level=3", "--task: 'level=3' is no task as JSON: unexpected character"),
        ("3", "--task: '3' is no task as JSON: a task is a mapping"),
        ('{"level": {"easy": 1}}', "only what `spread"),
        ('{"level": "%s"}' % ("x" * 5000), "a task of 5,012 bytes as JSON; at most 4,096"),
    ],
    ids=["no JSON", "a number", "a mapping in it", "too large"],
)
def test_what_is_no_task_is_refused_by_a_sentence_before_anything_is_read(task: str, said: str) -> None:
    options: Any = {"run": "nowhere", "explore": False, "as_json": True}
    with pytest.raises(ConfigError) as refused:
        evaluate(Asked(), task=[task], **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="--task: is not for --watch"):
        evaluate(Asked(), task=["{}"], watch=True, **options)


@pytest.mark.parametrize(
    ("option", "value"), [("render", Path("a.mp4")), ("explore", True), ("episodes", 50), ("as_json", True)]
)
def test_what_an_evaluation_in_training_does_not_do_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{option.removeprefix('as_')}: is not for --watch"):
        evaluate(Asked(), watch=True, **{"run": "nowhere", "explore": False, "as_json": False, option: value})


def test_the_command_gives_a_result_for_each_task(tmp_path: Path) -> None:
    """CartPole draws its first state between `low` and `high`: far out it falls at once."""
    save_run(tmp_path)
    tasks = [{"low": -0.01, "high": 0.01}, {"low": 0.2, "high": 0.205}]
    given = [part for task in tasks for part in ("--task", orjson.dumps(task).decode())]
    command = [sys.executable, "-m", "headrace.deploy", "evaluate", str(tmp_path), "--episodes", "4", *given]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    told = [orjson.loads(line) for line in ended.stdout.splitlines()]
    assert [own["task"] for own in told] == tasks
    assert told[0]["return"]["mean"] > 2 * told[1]["return"]["mean"]
    assert in_words(told[0]).startswith('task {"low":-0.01,"high":0.01}\nreturn  mean')


def test_the_command_has_an_exit_code_for_many_aborted_episodes_unless_it_accepts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path)
    flags = {"sampling.env": "support.envs.fleet:FailsWhenBad", "sampling.env_restart_attempts": 1000}
    given = {"run": str(tmp_path), "episodes": 20, "explore": True, "as_json": True}
    with pytest.raises(typer.Exit) as ended:
        evaluate(Asked(flags=flags), **given)
    out, log = capsys.readouterr()
    told = orjson.loads(out)
    assert ended.value.exit_code == ExitCode.EPISODES_ABORTED
    assert f"{told['aborted']} of {20 + told['aborted']} episodes were aborted" in log
    evaluate(Asked(flags=flags), accept_aborted=True, **given)
    assert orjson.loads(capsys.readouterr().out)["aborted"] > 1


def test_evaluation_refuses_envs_that_clients_drive_with_advice() -> None:
    with pytest.raises(EnvError, match=r"drives its own episodes.*`headrace serve`"):
        Evaluation(config_of("support.envs.external:Serving"), PlaySettings())
    served = build_config({"serving": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"clients drive this fleet's episodes.*serving\.enabled=false"):
        Evaluation(served, PlaySettings())
    for learner in ({"evaluate_every_steps": 5, "enabled": False}, {"evaluate_every_steps": 5}):
        with pytest.raises(ConfigError, match=r"learner\.evaluate_every_steps = 5.*leave one of them out"):
            build_config({"learner": learner, "serving": {"enabled": learner.get("enabled", True)}})


@pytest.mark.thorough
def test_a_signal_ends_an_evaluation_with_the_episodes_so_far(tmp_path: Path) -> None:
    save_run(tmp_path)
    options = ("--episodes", "100000", "--json", "--num-envs", "2")
    command = [sys.executable, "-m", "headrace.deploy", "evaluate", str(tmp_path), *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    with process:
        wait_until(lambda: "of 100000 episodes have ended" in (tmp_path / "log").read_text(), "progress")
        process.send_signal(signal.SIGTERM)
        told = orjson.loads(process.communicate(timeout=TIMEOUT_S)[0])
    assert process.returncode == ExitCode.FAILURE
    assert not told["complete"]
    assert 0 < told["episodes"] < 100000
    assert "stopped after" in (tmp_path / "log").read_text()


class Drawn(Counting):
    """A counting env that shows its index and time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.render_mode = config.get("render_mode")

    def render(self) -> Any:
        picture = np.zeros((32, 48, 3), np.uint8)
        picture[:, :, self.index] = 40 * self.t
        return picture


def frames_of(path: Path, ffmpeg: str, height: int, width: int) -> Any:
    """Return the pictures of a video, uint8 (frames, height, width, 3), as ffmpeg reads them."""
    command = [ffmpeg, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


@pytest.fixture
def ffmpeg() -> str:
    reason = "imageio-ffmpeg is not installed; pip install 'headrace[video]'"
    return str(pytest.importorskip("imageio_ffmpeg", reason=reason).get_ffmpeg_exe())


@pytest.mark.thorough
@pytest.mark.parametrize("episodes", [1, 2])
def test_the_video_has_the_first_episodes_of_the_first_env(tmp_path: Path, ffmpeg: str, episodes: int) -> None:
    config = config_of(f"{__name__}:Drawn", env_placement="process")
    with EpisodeVideo(tmp_path / "out.mp4", episodes) as video:
        told = played(config, PlaySettings(episodes=7), video)
    assert told["episodes"] == 7
    assert list(tmp_path.iterdir()) == [tmp_path / "out.mp4"]
    frames = frames_of(tmp_path / "out.mp4", ffmpeg, 32, 48)
    assert np.allclose(frames[:, :, :, 0].mean((1, 2)), [40 * t for t in range(6)] * episodes, atol=12)
    assert frames[:, :, :, 1].mean((1, 2)).max() < 30, "the second env is green"


@pytest.mark.usefixtures("ffmpeg")
def test_an_env_without_pictures_is_refused_at_its_first_episode(tmp_path: Path) -> None:
    config, words = config_of("support.envs.counting:Counting"), 'no picture; it should take render_mode = "rgb_array"'
    with pytest.raises(EnvError, match=words), EpisodeVideo(tmp_path / "out.mp4") as video:
        played(config, PlaySettings(episodes=1000), video)
    assert list(tmp_path.iterdir()) == []


class Undrawn(Counting):
    """A counting env whose constructor takes no render_mode."""

    def __init__(self) -> None:
        super().__init__({})


@pytest.mark.usefixtures("ffmpeg")
def test_an_env_without_a_render_mode_argument_is_refused_with_advice(tmp_path: Path) -> None:
    words = "--render: the env cannot be built with render_mode .*its constructor or creator should take render_mode"
    with pytest.raises(EnvError, match=words), EpisodeVideo(tmp_path / "out.mp4") as video:
        played(config_of(f"{__name__}:Undrawn"), PlaySettings(episodes=2), video)


@pytest.mark.usefixtures("ffmpeg")
def test_a_video_without_a_valid_path_or_an_encoder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"should end with \.mp4"):
        EpisodeVideo(tmp_path / "out.avi")
    with pytest.raises(ConfigError, match="in a folder that does not exist"):
        EpisodeVideo(tmp_path / "nowhere" / "out.mp4")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[video\]'"):
        EpisodeVideo(tmp_path / "out.mp4")


def test_gymnasiums_own_pictures_become_a_video(tmp_path: Path, ffmpeg: str) -> None:
    with EpisodeVideo(tmp_path / "out.mp4") as video:
        played(config_of("CartPole-v1"), PlaySettings(episodes=2), video)
    frames = frames_of(tmp_path / "out.mp4", ffmpeg, 400, 600)
    assert len(frames) == video.frames > 5
    assert 0 < (frames[0] < 100).mean() < 0.2, "a small cart on white ground"
