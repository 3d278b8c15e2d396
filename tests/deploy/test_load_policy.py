"""`load_policy`: the checkpoints that it finds, the policies that it builds, and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import orjson
import pytest
import torch
from typer.testing import CliRunner

from headrace.deploy import load_policy
from headrace.deploy.command.cli import app
from headrace.deploy.run.checkpoint_facts import TrainingCounts, counts_of, mean_return_of
from headrace.deploy.run.fleet_file import FleetFile
from headrace.learner_stub import LearnerState, save_policy
from headrace.schemas.errors import (
    CheckpointError,
    ConfigError,
    EncodeError,
    ExitCode,
    FencedError,
    ModuleError,
    RedisUnavailableError,
)
from support.fleets.saved_runs import arrays_of, best_action, save_run, save_run_of_two
from support.fleets.serving_process import cart_spaces
from support.waiting import TIMEOUT_S

SEEN = np.random.default_rng(0).uniform(-0.3, 0.3, (30, 4)).astype(np.float32)


def test_load_policy_finds_a_run_a_file_and_the_best_checkpoint(tmp_path: Path) -> None:
    module = save_run(tmp_path)
    best = save_run(tmp_path, "best.checkpoint", updates=5, seed=8)
    for policy, own, updates in (
        (load_policy(tmp_path), module, 9),
        (load_policy(str(tmp_path / "learner.checkpoint")), module, 9),
        (load_policy(tmp_path, which="best"), best, 5),
    ):
        assert policy.version == (2, updates)
        facts = f"update {updates} of learner epoch 2, {2048 * updates:,} steps, mean return {10 * updates + 2.5:.2f}"
        assert policy.source.endswith(f".checkpoint ({facts})")
        assert repr(policy) == (
            "TrainedPolicy(env='CartPole-v1', module='headrace.workers.modules:actor_critic', "
            f"weights={policy.source!r})"
        )
        assert [policy.act(seen) for seen in SEEN] == [best_action(own, seen) for seen in SEEN]
        assert policy.act(SEEN).tolist() == [best_action(own, seen) for seen in SEEN]
        assert policy.module.state_dict().keys() == own.state_dict().keys()
        assert not policy.module.training
    assert policy.spaces == {"default_policy": cart_spaces()}


def test_a_policy_of_a_run_with_env_hosts_leaves_the_run_directory_alone(tmp_path: Path) -> None:
    save_run(tmp_path)
    config = orjson.loads((tmp_path / "config.json").read_bytes())
    config["sampling"]["env_placement"] = "remote"
    config["fleet"] = {"run_dir": str(tmp_path / "of-the-fleet")}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    assert load_policy(tmp_path).version == (2, 9)
    assert not (tmp_path / "of-the-fleet").exists()


def test_several_policies_act_by_agent_or_by_module_id(tmp_path: Path) -> None:
    modules = save_run_of_two(tmp_path)
    policy = load_policy(tmp_path)
    assert policy.agents == ["short", "long"]
    assert policy.modules.keys() == modules.keys()
    for name, module in modules.items():
        due = [best_action(module, seen) for seen in SEEN]
        assert policy.act(SEEN, module_id=name).tolist() == policy.act(SEEN, agent=name).tolist() == due


def test_with_spaces_no_env_is_needed(tmp_path: Path) -> None:
    module = save_run(tmp_path)
    game = gym.make("CartPole-v1")
    spaces = game.observation_space, game.action_space
    policy = load_policy(tmp_path, settings={"sampling.env": "no_such_simulator:make"}, spaces=spaces)
    assert policy.act(SEEN).tolist() == [best_action(module, seen) for seen in SEEN]
    (tmp_path / "learner.checkpoint").unlink()
    save_run_of_two(tmp_path)
    assert load_policy(tmp_path, spaces={"short": spaces, "long": spaces}).act(SEEN[0], module_id="long") in (0, 1)
    with pytest.raises(ConfigError, match=r"spaces: has spaces of \['short'\]; the policies are \['long', 'short'\]"):
        load_policy(tmp_path, spaces={"short": spaces})
    with pytest.raises(ConfigError, match=r"should be \(observation space, action space\), got 3"):
        load_policy(tmp_path, spaces=3)


def test_a_users_own_learner_saves_a_policy_that_load_policy_reads(tmp_path: Path) -> None:
    module = save_run(tmp_path)
    (tmp_path / "learner.checkpoint").unlink()
    learnt = {name: array for name, array in arrays_of(module).items() if name.startswith("connectors/")}
    for updates in (3, 4):
        save_policy(tmp_path, {**module.state_dict(), **learnt}, updates=updates, steps=640)
    policy = load_policy(tmp_path)
    assert policy.act(SEEN).tolist() == [best_action(module, seen) for seen in SEEN]
    assert "update 4 of learner epoch 1, 640 steps" in policy.source
    game = gym.make("CartPole-v1")
    spaces = {"shared": (game.observation_space, game.action_space)}
    policy = load_policy(tmp_path, settings={"sampling.policies": {"shared": {}}}, spaces=spaces)
    assert policy.act(SEEN).tolist() == [best_action(module, seen) for seen in SEEN], "the only policy needs no name"
    save_policy(str(tmp_path), module.state_dict(), epoch=3, steps=640)
    assert load_policy(tmp_path).source.endswith("(learner epoch 3, 640 steps)"), "updates are not told"
    with pytest.raises(FencedError, match="was written by learner epoch 3"):
        save_policy(tmp_path, module.state_dict(), epoch=2)
    with pytest.raises(EncodeError, match="cannot be published or saved"):
        save_policy(tmp_path, {})

    two = tmp_path / "two"
    two.mkdir()
    modules = save_run_of_two(two)
    doubled = {name: {n: 2 * t for n, t in own.state_dict().items()} for name, own in modules.items()}
    save_policy(two, doubled)
    saved = load_policy(two).modules
    for name, own in doubled.items():
        assert all((saved[name].state_dict()[part] == tensor).all() for part, tensor in own.items())


class Position:
    """Of a stream, what `LearnerState.save` asks for."""

    epoch, group = 2, "train"

    def position(self) -> list[dict[str, Any]]:
        return []


@pytest.mark.processes
def test_load_policy_and_headrace_evaluate_read_the_checkpoint_of_state_save(tmp_path: Path) -> None:
    module = save_run(tmp_path)
    (tmp_path / "learner.checkpoint").unlink()
    learnt = {name: array for name, array in arrays_of(module).items() if name.startswith("connectors/")}
    optimizer = torch.optim.Adam(module.parameters())
    module.forward_train({"obs": torch.zeros(1, 4)})["values"].sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state = LearnerState(tmp_path)
    more: dict[str, Any] = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state(), "note": "mine"}
    state.save(Position(), {**module.state_dict(), **learnt}, updates=4, steps=640, **more)  # type: ignore[arg-type]
    policy = load_policy(tmp_path)
    assert policy.act(SEEN).tolist() == [best_action(module, seen) for seen in SEEN]
    told = "learner.checkpoint (update 4 of learner epoch 2, 640 steps)"
    assert repr(policy).endswith(f"{told}')")
    command = [sys.executable, "-m", "headrace.deploy", "evaluate", ".", "--episodes", "2", "--json"]
    played = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert played.returncode == 0, played.stderr
    assert orjson.loads(played.stdout)["episodes"] == 2
    assert told in played.stderr


@pytest.mark.parametrize("returns", [None, [], ["high"], [float("inf")], {"a": 1.0}])
def test_a_checkpoint_without_returns_tells_none(returns: Any) -> None:
    assert mean_return_of({"recent_returns": returns}) is None


def test_impossible_counts_in_a_checkpoint_are_left_out() -> None:
    assert counts_of({"updates": (1 << 64) - 1, "steps": True}) == TrainingCounts()
    assert counts_of({"modules": {"a": {"updates": -1, "steps": 7}, "b": {"steps": 5}}}) == TrainingCounts(0, 12)


def test_a_missing_or_unfitting_checkpoint_gives_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name a run directory"):
        load_policy(tmp_path)
    save_run(tmp_path)
    with pytest.raises(CheckpointError, match="there is none yet: it is kept from the first evaluation on"):
        load_policy(tmp_path, which="best")
    with pytest.raises(CheckpointError, match="only a run directory has a best checkpoint"):
        load_policy(tmp_path / "learner.checkpoint", which="best")
    with pytest.raises(ConfigError, match="which: should be one of newest, best, got 'first'"):
        load_policy(tmp_path, which="first")  # type: ignore[arg-type]
    with pytest.raises(ModuleError, match=r"of another policy than headrace\.workers\.modules:actor_critic"):
        load_policy(tmp_path, settings={"module.config": {"hidden": [8]}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_policy_of_a_gpu_is_refused_where_there_is_none_and_can_be_exported(tmp_path: Path) -> None:
    save_run(tmp_path)
    config = orjson.loads((tmp_path / "config.json").read_bytes())
    config["sampling"]["device"] = "cuda"
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(ConfigError, match=r"sampling\.device: 'cuda' cannot be used here: torch .*'cpu'"):
        load_policy(tmp_path)
    assert load_policy(tmp_path, settings={"sampling.device": "auto"}).act(SEEN[0]) in (0, 1)
    written = CliRunner().invoke(app, ["export", str(tmp_path), "--to", str(tmp_path / "policy.pt")])
    assert written.exit_code == 0, written.output


def test_a_run_without_a_checkpoint_or_redis_gives_an_error_with_advice(tmp_path: Path) -> None:
    FleetFile(fleet_id="mine", redis_url="redis://:secret@127.0.0.1:1/0").write(tmp_path / "fleet.json")
    with pytest.raises(RedisUnavailableError, match=f"there is no learner.checkpoint in {tmp_path}") as caught:
        load_policy(tmp_path, settings={"sampling.env": "CartPole-v1"})
    assert f"headrace up --resume {tmp_path}" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.thorough
def test_headrace_export_writes_a_file_and_refuses_an_unknown_suffix(tmp_path: Path) -> None:
    save_run(tmp_path)

    def export(to: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace.deploy", "export", str(tmp_path), "--to", to]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

    written = export("policy.pt")
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("policy.pt: ")
    assert (tmp_path / "policy.pt").stat().st_size > 1000
    refused = export("policy.h5")
    assert refused.returncode == ExitCode.MODULE
    assert "error: the policy cannot be exported to policy.h5: name a file that ends with" in refused.stderr
