"""`headrace serve` of a checkpoint of several policies: each agent of a client gets actions of its own policy."""

from __future__ import annotations

import re
import signal
from functools import cache
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from headrace.deploy.clients import http_client
from headrace.deploy.trained.saved_policy import find_policy
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, save_checkpoint
from headrace.learner_stub.reference.ppo import training_arrays
from headrace.schemas.messages.weights import CONNECTORS, join_modules
from headrace.workers.modules import actor_critic
from headrace.workers.serving.client import PolicyClient
from support.fleets.serving_process import cart_spaces, served_at, serving
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes

MEANS = {"short": np.full(4, 0.1), "long": np.full(4, -0.1)}
AGENTS = tuple(MEANS)
MEAN_STD = "headrace.workers.connectors:MeanStd"


@cache
def policy(agent: str) -> torch.nn.Module:
    torch.manual_seed(AGENTS.index(agent))
    module = actor_critic(cart_spaces())
    with torch.no_grad():  # at first all actions are nearly alike to it
        for parameter in module.parameters():
            parameter.mul_(3)
    return module


def expected(agent: str, observation: np.ndarray) -> int:
    """The best action of the agent's own policy, by hand, of what its own connector makes of it."""
    scaled = torch.from_numpy(((observation - MEANS[agent]) / 0.1).astype(np.float32))[None]
    with torch.inference_mode():
        answer = policy(agent).eval().forward_inference({"obs": scaled})  # type: ignore[operator]
    return int(answer["action_dist_inputs"].argmax())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """As a learner of two policies leaves it, whose connectors have learnt."""
    arrays = {}
    for agent, mean in MEANS.items():
        moments = {"count": np.full(1, 1e6), "mean": mean, "m2": np.full(4, 1e4)}
        learnt = {f"{CONNECTORS}env_to_module/0.MeanStd/obs/{name}": part for name, part in moments.items()}
        arrays[agent] = {**training_arrays(policy(agent).state_dict(), {"state": {}}), **learnt}
    state = {"modules": {"short": {"updates": 7}, "long": {"updates": 7}}}
    save_checkpoint(tmp_path / "learner.checkpoint", Checkpoint(2, [], state, join_modules(arrays)))
    sampling = {
        "env": "headrace.workers.agents.examples:two_carts",
        "num_envs": 4,
        "policies": {agent: {"env_to_module": [MEAN_STD]} for agent in AGENTS},
    }
    (tmp_path / "config.json").write_bytes(orjson.dumps({"sampling": sampling}))
    return tmp_path


def test_each_agent_is_answered_by_its_policy_over_zmq_and_http(run_dir: Path) -> None:
    rows = np.random.default_rng(0).uniform(-0.3, 0.3, (20, 2, 4)).astype(np.float32)
    with serving(run_dir, "--http", "0", "--json") as process:
        with PolicyClient(served_at(run_dir), timeout_s=TIMEOUT_S) as client:
            episode = client.start_episode()
            for row in rows:
                seen = dict(zip(AGENTS, row, strict=True))
                assert client.get_action(episode, seen) == {agent: expected(agent, own) for agent, own in seen.items()}
                client.log_returns(episode, {"short": 1.0, "long": 0.5})
            client.end_episode(episode, seen)
            log = (run_dir / "log").read_text()
            assert "update 7 of learner epoch 2" in log
            address = re.search(r"http://127.0.0.1:(\d+)", log)
            assert address is not None
            over_http = http_client.PolicyServer(address[0])
            walk = f"{over_http.session}/episodes/walk"
            for url in (over_http.session, walk):
                over_http.ask("PUT", url)
            told = {agent: own.tolist() for agent, own in seen.items()}
            answer = over_http.ask("PUT", f"{walk}/steps/0", {"observation": told})
            assert answer["action"] == {agent: expected(agent, own) for agent, own in seen.items()}
            over_http.ask("DELETE", over_http.session)
            over_http.close()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=TIMEOUT_S)
    found = orjson.loads(said)
    assert process.returncode == 0
    assert (found["episodes"], found["steps"], found["mean_return"]) == (1, 20, 30.0)
    assert found["mean_return_by_agent"] == {"short": 20.0, "long": 10.0}
    assert found["weights"] == [2, 7]


def test_find_policy_reads_the_modules_and_version_of_a_checkpoint(run_dir: Path) -> None:
    found = find_policy(str(run_dir), "")
    assert found.modules == ["long", "short"]
    assert found.version == (2, 7)
