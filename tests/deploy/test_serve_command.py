"""`headrace serve`: a real process that answers from a checkpoint, and its errors."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import gymnasium as gym
import numpy as np
import orjson
import pytest
import torch
from typer.testing import CliRunner

from headrace.deploy.clients import http_client
from headrace.deploy.command.cli import app
from headrace.deploy.trained.saved_policy import find_policy
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, save_checkpoint
from headrace.learner_stub.reference.ppo import training_arrays
from headrace.schemas.errors import CheckpointError, ConfigError, ExitCode, ModuleError, PortInUseError
from headrace.schemas.errors.episodes import EpisodesClosedError
from headrace.schemas.messages.weights import CONNECTORS, join_modules
from headrace.workers.connectors import MeanStd
from headrace.workers.modules import actor_critic
from headrace.workers.serving.client import PolicyClient
from support.fleets.serving_process import cart_spaces, served_at, serving
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

MEAN, COUNT = np.array([0.2, -0.2, 0.1, 0.2]), 1_000_000
CONFIG = '[sampling]\nenv = "CartPole-v1"\nnum_envs = 4\nenv_to_module = ["headrace.workers.connectors:MeanStd"]\n'


@cache
def policy() -> torch.nn.Module:
    torch.manual_seed(7)
    connector = MeanStd()
    module = actor_critic(connector.connect(cart_spaces(), 1))
    with torch.no_grad():  # at first all actions are nearly alike to it
        for parameter in module.parameters():
            parameter.mul_(3)
    return module


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """As a learner leaves it whose connectors have learnt."""
    moments = {"count": np.full(1, float(COUNT)), "mean": MEAN, "m2": np.full(4, 0.01 * COUNT)}
    learnt = {f"{CONNECTORS}env_to_module/0.MeanStd/obs/{name}": np.asarray(part) for name, part in moments.items()}
    arrays = {**training_arrays(policy().state_dict(), {"state": {0: {"exp_avg": torch.ones(3)}}}), **learnt}
    save_checkpoint(tmp_path / "learner.checkpoint", Checkpoint(2, [], {"updates": 9}, arrays))
    (tmp_path / "config.json").write_bytes(orjson.dumps({"sampling": {"env": "CartPole-v1", "num_envs": 4}}))
    (tmp_path / "fleet.toml").write_text(CONFIG)
    return tmp_path


def expected(observation: np.ndarray) -> int:
    """The best action by hand. What a MeanStd sees besides `COUNT` rows moves its scale by nothing."""
    scaled = torch.from_numpy(((observation - MEAN) / 0.1).astype(np.float32))[None]
    with torch.inference_mode():
        answer = policy().eval().forward_inference({"obs": scaled})  # type: ignore[operator]
    return int(answer["action_dist_inputs"].argmax())


def played(client: PolicyClient, seed: int) -> int:
    """CartPole for some steps; gives how many."""
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    episode, steps, over = client.start_episode(training_enabled=seed % 2 == 0), 0, False
    while not over:
        action = int(client.get_action(episode, observation))
        observation, reward, terminated, _, _ = env.step(action)
        client.log_returns(episode, float(reward))
        steps, over = steps + 1, terminated or steps == 20
    client.end_episode(episode, observation, truncated=not terminated)
    env.close()
    return steps


def test_a_checkpoint_answers_over_zmq_and_http_and_a_stop_lets_episodes_end(run_dir: Path) -> None:
    options = ("--config", str(run_dir / "fleet.toml"), "--http", "0", "--json")
    with serving(run_dir, *options) as process, PolicyClient(served_at(run_dir), timeout_s=TIMEOUT_S) as client:
        lengths = [played(client, seed) for seed in range(4)]
        probe = client.start_episode()
        for seen in np.random.default_rng(0).normal(MEAN, 0.2, (40, 4)):
            observation = np.clip(seen, -0.4, 0.4).astype(np.float32)
            assert client.get_action(probe, observation) == expected(observation)
        log = (run_dir / "log").read_text()
        assert "update 9 of learner epoch 2" in log
        assert "explore off" in log
        address = re.search(r"http://127.0.0.1:(\d+)", log)
        assert address is not None
        over_http = http_client.PolicyServer(address[0])
        walk = f"{over_http.session}/episodes/walk"
        for url in (over_http.session, walk):
            over_http.ask("PUT", url)
        answer = over_http.ask("PUT", f"{walk}/steps/0", {"observation": MEAN.tolist()})
        assert answer["action"] == expected(MEAN)

        process.send_signal(signal.SIGTERM)
        wait_until(lambda: _is_closed(client), what="the end of admission")
        client.log_returns(probe, 3.0)
        client.end_episode(probe, observation)
        over_http.ask("PUT", f"{walk}/steps/1", {"observation": MEAN.tolist(), "end": "terminated"})
        over_http.close()
        told, _ = process.communicate(timeout=TIMEOUT_S)
    found = orjson.loads(told)
    assert process.returncode == 0
    assert (found["episodes"], found["aborted"], found["weights"]) == (6, 0, [2, 9])
    assert found["steps"] == sum(lengths) + 40 + 1
    assert found["mean_return"] == pytest.approx((sum(lengths) + 3.0) / 6)
    assert found["min_return"] == 0


@pytest.mark.thorough
def test_the_sample_client_prints_its_mean_return_and_ends(run_dir: Path) -> None:
    client = [sys.executable, "-m", "headrace.deploy.clients.cartpole"]
    shown = subprocess.run([*client, "--help"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
    assert "--episodes" in shown
    with serving(run_dir, "--config", str(run_dir / "fleet.toml")):
        play = [*client, served_at(run_dir), "2", "--episodes", "3"]
        played = subprocess.run(play, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert played.returncode == 0, played.stderr
    assert re.search(r"^\d episodes, mean return of the newest \d: [\d.]+$", played.stdout, re.MULTILINE)


def _is_closed(client: PolicyClient) -> bool:
    try:
        client.abort_episode(client.start_episode())
    except EpisodesClosedError:
        return True
    return False


def refusal(*arguments: str) -> BaseException:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exception is not None, result.output
    return result.exception


def test_a_missing_torn_or_unfitting_checkpoint_is_refused(tmp_path: Path) -> None:
    for place, why in ((tmp_path, "there is none"), (tmp_path / "nothing.checkpoint", "it does not exist")):
        error = refusal("--checkpoint", str(place))
        assert isinstance(error, CheckpointError)
        assert error.exit_code is ExitCode.RUN_DIR
        assert why in str(error)
        assert "name a run directory" in str(error)
    (tmp_path / "torn").write_bytes(b"\x90")
    with pytest.raises(CheckpointError, match="it ends within its header, after 1 bytes"):
        find_policy(str(tmp_path / "torn"), "")
    two = join_modules({"a": {"module/w": np.ones(2)}, "b": {"module/w": np.ones(2)}})
    save_checkpoint(tmp_path / "two", Checkpoint(1, [], {}, two))
    error = refusal("--checkpoint", str(tmp_path / "two"))
    assert isinstance(error, ConfigError)
    assert "has the policies ['a', 'b'], and the settings name one policy without a name" in str(error)
    error = refusal("--checkpoint", str(tmp_path / "two"), "--set", 'sampling.policies={"a": {}, "c": {}}')
    assert "has the policies ['a', 'b'], and the settings name the policies ['a', 'c']" in str(error)


def test_other_spaces_other_modules_and_missing_connectors_are_refused(run_dir: Path) -> None:
    toml = ("--config", str(run_dir / "fleet.toml"))
    for other in (("--env", "Acrobot-v1"), ("--set", 'module.config={"hidden": [8]}')):
        error = refusal("--checkpoint", str(run_dir), *toml, *other)
        assert isinstance(error, ModuleError | ConfigError), repr(error)
    error = refusal("--checkpoint", str(run_dir), *toml, "--env", "Acrobot-v1")
    assert "of another policy than headrace.workers.modules:actor_critic for Acrobot-v1" in str(error)
    assert "name its env and module" in str(error)
    error = refusal("--checkpoint", str(run_dir))  # config.json beside it knows of no connectors
    assert "0.MeanStd" in str(error)


def test_a_taken_port_and_an_open_address_without_keys_are_refused(run_dir: Path) -> None:
    toml = ("--checkpoint", str(run_dir), "--config", str(run_dir / "fleet.toml"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert isinstance(refusal(*toml, "--http", port), PortInUseError)
        by_tcp = ("--host", "127.0.0.1", "--set", "broker.allow_insecure=true")
        assert isinstance(refusal(*toml, *by_tcp, "--port", port), PortInUseError)
    for host in ("0.0.0.0", "127.0.0.1"):
        assert "serves by TCP, and there are no keys" in str(refusal(*toml, "--host", host))
