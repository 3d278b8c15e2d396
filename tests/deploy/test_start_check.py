"""Mistakes that `headrace up` finds before it starts the fleet, and the error for each."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.deploy.annexes.doctor.env_trial import try_env
from headrace.deploy.annexes.doctor.start_check import check_start
from headrace.deploy.fleet import check_process
from headrace.deploy.process import event_loop
from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.fork_server import ForkServer
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.run.run_dir import RunDir
from headrace.deploy.trained.policy_spaces import built_env
from headrace.schemas.errors import ConfigError, EnvError, ExitCode, HeadraceError, UnknownEnvError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from headrace.workers import EnvRunnerConfig
from support.ports import by_tcp
from support.waiting import TIMEOUT_S

LEAVING = """
import multiprocessing
import signal
import threading

import gymnasium as gym


def endless():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def make(context):
    threading.Thread(target=threading.Event().wait, name="poller").start()
    multiprocessing.get_context("fork").Process(target=endless, name="simulator").start()
    return gym.make("CartPole-v1")
"""

USER_CODE = '''
import os
import threading

import gymnasium as gym
import numpy as np
import torch

from headrace.workers import MultiAgentEnv


class Bare(torch.nn.Module):
    """It acts, and cannot be trained by PPO."""

    noise_size, noise_kind = 1, "uniform"

    def forward_exploration(self, batch):
        rows = len(batch["obs"])
        return {"actions": torch.zeros(rows, dtype=torch.int64), "logp": torch.zeros(rows)}

    forward_inference = forward_train = forward_exploration


class Silent(Bare):
    def forward_exploration(self, batch):
        return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64)}

    forward_inference = forward_train = forward_exploration

    def logp(self, dist_inputs, actions): ...
    def entropy(self, dist_inputs): ...


class Chunks(Silent):
    action_chunk_size = 2

    def forward_exploration(self, batch):
        return {name: column[:, None].expand(-1, 2) for name, column in Bare.forward_exploration(self, batch).items()}

    forward_inference = forward_exploration


def chunks(spaces):
    return Chunks()


def bare(spaces):
    return Bare()


def silent(spaces):
    return Silent()


def narrow(spaces):
    module = Bare()
    module.layer = torch.nn.Linear(3, 2)
    module.forward_exploration = lambda batch: {"actions": module.layer(batch["obs"])}
    return module


class Faulty(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        if self.fault == "reset":
            raise RuntimeError("the scene is missing")
        if self.fault == "seed":
            np.random.RandomState(seed)
        info = {"scene": self} if self.fault == "reset info" else {}
        return np.zeros(4 if self.fault == "shape" else 3, np.float32), info

    def step(self, action):
        if self.fault == "hang":
            threading.Event().wait()
        if self.fault == "step":
            raise RuntimeError("no such joint")
        kind = np.float64 if self.fault == "dtype" else np.float32
        answer = np.zeros(3, kind), 0.0, False, False, {"scene": self} if self.fault == "info" else {}
        return answer[:4] if self.fault == "answer" else answer


class Masked(Faulty):
    """It takes no action but one that its mask shows as legal."""

    observation_space = gym.spaces.Dict(obs=Faulty.observation_space, action_mask=gym.spaces.MultiBinary(50))
    action_space = gym.spaces.Discrete(50)

    def reset(self, *, seed=None, options=None):
        mask = np.zeros(50, np.int8)
        mask[7] = 1
        return {"obs": np.zeros(3, np.float32), "action_mask": mask}, {}

    def step(self, action):
        assert action == 7
        return self.reset()[0], 0.0, False, False, {}


class Pair(MultiAgentEnv):
    possible_agents = ["left", "right"]
    observation_spaces = dict.fromkeys(possible_agents, Faulty.observation_space)
    action_spaces = dict.fromkeys(possible_agents, Faulty.action_space)

    def reset(self, *, seed=None, options=None):
        return {"left": np.zeros(3, np.float32)}, {}

    def step(self, actions):
        assert list(actions) == ["left"]
        return {"right": np.zeros(5, np.float32)}, {}, {}, {}, {}


def two_of_a_kind(context):
    return gym.vector.SyncVectorEnv([lambda: Faulty(**context)] * 2)


def broken(context):
    raise RuntimeError("no licence for the simulator")


def crashing(context):
    os.abort()


def slow(context):
    threading.Event().wait(1.0)
    return gym.make("CartPole-v1")
'''


def up(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (cwd / "user.py").write_text(USER_CODE)
    command = [sys.executable, "-m", "headrace.deploy", "up", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.mark.one_in(6)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--env", "CartPol-v1"), ExitCode.ENV, ("'CartPol-v1' cannot be found", "Did you mean: `CartPole`?")),
        (("--set", "module.build=nowhere:build"), ExitCode.MODULE, ("'nowhere:build' cannot be found",)),
        (("--set", "module.build=user:bare"), ExitCode.MODULE, ("user:bare", "has no logp, entropy", "learner")),
        (("--env", "user:broken"), ExitCode.ENV, ("user:broken", "RuntimeError: no licence for the simulator")),
        (
            ("--env", "user:Faulty", "--set", "sampling.env_config.fault=shape"),
            ExitCode.ENV,
            ("'user:Faulty' failed at its first reset", "should be float32 (3,), got float32 (4,)", "--no-check-env"),
        ),
        (("--env", "user:crashing"), ExitCode.ENV, ("building one env of 'user:crashing'", "SIGABRT")),
    ],
)
def test_a_mistake_ends_headrace_up_before_the_fleet_starts(
    tmp_path: Path, arguments: tuple[str, ...], code: ExitCode, parts: tuple[str, ...]
) -> None:
    result = up(tmp_path, *arguments)
    assert result.returncode == code, result.stderr
    sentence = result.stderr.rpartition("error: ")[2]
    for part in parts:
        assert part in sentence
    assert "started: pid" not in result.stderr
    assert not list(tmp_path.glob("runs/*")), "a run directory stays though nothing has run"


@pytest.mark.thorough
@pytest.mark.processes
def test_the_check_leaves_only_its_log_in_an_existing_directory(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = up(tmp_path, "--run-dir", ".", *by_tcp(port))
    misspelt = up(tmp_path, "--run-dir", ".", "--env", "CartPol-v1")
    assert (taken.returncode, misspelt.returncode) == (ExitCode.PORT_IN_USE, ExitCode.ENV)
    assert str(port) in taken.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"user.py", "lock", "logs", "recorders"}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"check.log"}


def config(**sections: dict[str, Any]) -> FleetConfig:
    return build_config(sections)


def mistake(**sections: dict[str, Any]) -> str:
    """Return the error of the check for these settings."""
    with pytest.raises(HeadraceError) as caught:
        check_start(config(**sections), lambda step: None)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the settings ask for")
def test_a_device_that_is_not_there_is_told_before_an_env_is_built() -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match=r"sampling\.device: 'cuda' cannot be used here: torch .*'cpu'"):
        check_start(config(sampling={"device": "cuda"}), steps.append)
    assert steps == ["looking up what the config names"]
    check_start(config(sampling={"device": "auto"}), steps.append)


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user", raising=False)


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_call_that_no_worker_allows_is_refused(call: str) -> None:
    sampling = {"env": "user:Faulty", f"env_{call}_timeout_s": 1e-9}
    assert re.search(
        f"env 'user:Faulty' took .* s for its first {call}, and sampling.env_{call}_timeout_s = 1e-09 allows no worker",
        mistake(sampling=sampling),
    )


@pytest.mark.usefixtures("user_code")
def test_a_poll_of_inline_envs_beyond_the_lease_is_told_with_the_remedy() -> None:
    slow = {"env": "user:Faulty", "num_envs": 16}
    broker = {"lease_s": 1e-9}
    said = check_start(config(sampling=slow, broker=broker), lambda step: None)
    assert "with 16 inline envs takes" in said
    assert "--set sampling.env_placement=process --set sampling.envs_per_process=1 runs them side by side" in said
    slow |= {"env_placement": "process", "envs_per_process": 3}
    said = check_start(config(sampling=slow, broker=broker), lambda step: None)
    assert "so a process of 3 envs takes" in said
    assert "; --set sampling.envs_per_process=1 runs them side by side" in said
    slow["envs_per_process"] = 1
    assert not check_start(config(sampling=slow, broker=broker), lambda step: None)
    assert not check_start(config(sampling={"env": "user:Faulty"}), lambda step: None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, at an import
@pytest.mark.usefixtures("user_code")
def test_a_module_must_give_the_outputs_that_the_learner_needs() -> None:
    assert "'user:silent' gives no 'logp' in forward_exploration" in mistake(module={"build": "user:silent"})
    assert "'user:chunks' has an action_chunk_size, and the ref" in mistake(module={"build": "user:chunks"})
    assert "'user:narrow' does not fit its env's spaces" in mistake(module={"build": "user:narrow"})
    said = mistake(module={"build": "user:narrow", "compile": True})
    assert "does not fit its env's spaces, or torch does not compile it (module.compile = true): " in said
    own_learner = config(module={"build": "user:bare"}, learner={"enabled": False})
    check_start(own_learner, lambda step: None)  # whose needs are its own affair


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reset", "at its first reset: RuntimeError: the scene is missing; correct the env"),
        ("seed", "at its first reset: ValueError: Seed must .*set max_env_seed = 2147483647; correct the env"),
        ("step", "at its first step: RuntimeError: no such joint; correct the env"),
        ("dtype", r"at its first step: observation should be float32 \(3,\), got float64 \(3,\)"),
        ("answer", "at its first step: answer of step should be .*, got 4 values"),
    ],
)
def test_an_env_is_reset_and_stepped_once(fault: str, said: str) -> None:
    sampling = {"env": "user:Faulty", "env_config": {"fault": fault}}
    assert re.search(f"env 'user:Faulty' failed {said}", mistake(sampling=sampling))


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize("fault", ["reset info", "info"])
def test_an_info_that_no_message_can_hold_is_no_mistake(fault: str) -> None:
    sampling = {"env": "user:Faulty", "env_config": {"fault": fault}}
    for others in ({}, {"infos": "none"}, {"env_placement": "process"}):
        check_start(config(sampling=sampling | others), lambda step: None)


@pytest.mark.usefixtures("user_code")
def test_the_check_steps_masked_multi_agent_and_vector_envs() -> None:
    check_start(config(sampling={"env": "user:Masked"}), lambda step: None)
    pair = {"env": "user:Pair", "policies": {"one": {}}}
    assert "first step: observation of agent 'right' should be float32 (3,), got float32 (5,)" in mistake(sampling=pair)
    vector = {"env": "user:two_of_a_kind", "num_envs": 2}
    check_start(config(sampling=vector), lambda step: None)
    assert "first step: RuntimeError: no such joint" in mistake(sampling={**vector, "env_config": {"fault": "step"}})


class OneLegal(gym.Env[Any, Any]):
    """It takes only the last choice of each element, as its mask shows, which may be in its info."""

    def __init__(self, config: Any) -> None:
        self.action_space: Any = gym.spaces.MultiDiscrete([30, 40])
        self._mask = np.zeros(70, np.int8)
        self._mask[[29, 69]] = config["flag"]
        self._in_info = config["in the info"]
        box = gym.spaces.Box(-1.0, 1.0, (1,))
        both = gym.spaces.Dict({"obs": box, "action_mask": gym.spaces.MultiBinary(70)})
        self.observation_space: Any = box if self._in_info else both

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen = np.zeros(1, np.float32)
        return (seen, {"action_mask": self._mask}) if self._in_info else ({"obs": seen, "action_mask": self._mask}, {})

    def step(self, action: Any) -> Any:
        assert action.tolist() == [29, 39]
        return self.reset()[0], 0.0, False, False, {}


@pytest.mark.parametrize("in_info", [False, True])
def test_the_trial_of_an_env_takes_a_legal_action_and_says_where_there_is_none(in_info: bool) -> None:
    for flag in (1, 0):
        config = EnvRunnerConfig(env=OneLegal, env_config={"in the info": in_info, "flag": flag})
        with built_env(config) as built:
            if flag:
                assert try_env(config, built).keys() == {"reset", "step"}
            else:
                with pytest.raises(EnvError, match=r"failed at its first step: .*action_mask"):
                    try_env(config, built)


LONG = {"env": "user:Faulty", "rollout_fragment_length": 8000}
"""A batch of 64,000 steps in 8 chunks, with 12 bytes of observations each."""
MANY = {"sampling": LONG, "broker": {"max_batch_bytes": 768_000}}


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("sections", "key", "least"),
    [
        ({"sampling": LONG}, "broker.max_batch_bytes", 96_000),
        (
            {**MANY, "fleet": {"workers": 5}, "learner": {"steps_per_update": 20 * 64_000}},
            "broker.max_held_bytes",
            24 * 768_000,  # twenty batches, and one for each other worker's share of the room
        ),
        (
            {**MANY, "learner": {"steps_per_update": 200_000}},
            "broker.max_held_bytes",
            4 * 2 * 768_000,  # four batches of two workers, of which each keeps a quarter
        ),
    ],
)
def test_a_limit_in_bytes_that_is_too_small_for_a_batch_or_an_update_is_refused(
    sections: dict[str, Any], key: str, least: int
) -> None:
    section, _, name = key.partition(".")

    def having(nbytes: int) -> dict[str, Any]:
        return {**sections, section: {**sections.get(section, {}), name: nbytes}}

    check_start(config(**having(least)), lambda step: None)
    said = mistake(**having(least - 1))
    assert said.startswith(f"{key}: {least - 1:,} ")
    what = "a chunk of" if name == "max_batch_bytes" else "a batch of sampling.num_envs = 8 times"
    assert f"{what} sampling.rollout_fragment_length " in said
    varying = {**sections, "sampling": {**sections["sampling"], "batch_mode": "complete_episodes"}}
    sections = varying
    check_start(config(**having(least - 1)), lambda step: None)


def test_unknown_connectors_and_callbacks_are_named() -> None:
    assert "has no 'MeanStdd'" in mistake(sampling={"env_to_module": ["headrace.workers.connectors:MeanStdd"]})
    assert "nowhere" in mistake(sampling={"callbacks": ["nowhere:Callback"]})


def test_the_error_for_agents_without_policies_names_the_setting() -> None:
    said = mistake(sampling={"env": "headrace.workers.agents.examples:two_carts"})
    assert "sampling.policies" in said
    several = {"env": "headrace.workers.agents.examples:two_carts", "policies": {"one": {}}}
    check_start(config(sampling=several), lambda step: None)


def test_the_error_for_an_unregistered_env_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for env_id in ("ALE/Breakout-v5", "MiniGrid-Empty-5x5-v0"):  # another test of this process may have registered it
        monkeypatch.delitem(gym.registry, env_id, raising=False)
    assert "ale_py:ALE/Breakout-v5" in mistake(sampling={"env": "ALE/Breakout-v5"})
    assert "minigrid:MiniGrid-Empty-5x5-v0" in mistake(sampling={"env": "MiniGrid-Empty-5x5-v0"})


def test_the_error_for_an_env_that_workers_do_not_know_names_the_module_that_registers_it() -> None:
    assert "'module:id' with the module of yours that registers it" in mistake(sampling={"env": "Mine-v0"})


def test_the_error_for_a_mission_space_names_the_wrapper_that_removes_it() -> None:
    assert "minigrid.wrappers.ImgObsWrapper" in mistake(sampling={"env": "minigrid:MiniGrid-Empty-5x5-v0"})


def test_the_error_for_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(UnknownEnvError, match=r"pip install 'headrace\[envs\]'"):
        check_start(config(sampling={"env": "ale_py:ALE/Breakout-v5"}), lambda step: None)


@pytest.mark.parametrize(
    ("package", "extra", "settings"),
    [
        ("lz4", "lz4", {"worker.compression": "lz4"}),
        ("stable_baselines3", "sb3", {"module.build": "headrace.workers.modules.sb3:sb3_policy"}),
    ],
)
def test_a_missing_package_of_a_setting_is_told_with_its_extra_before_the_start(
    package: str, extra: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "headrace.workers.modules.sb3", raising=False)
    with pytest.raises(HeadraceError, match=re.escape(f"pip install 'headrace[{extra}]'")) as caught:
        check_start(FleetConfig().replaced(settings), print)
    assert "PYTHONPATH" not in str(caught.value)


def test_the_check_does_not_look_up_envs_of_other_machines() -> None:
    elsewhere = {"env": "only_there:make"}
    for sections in (
        {"sampling": {**elsewhere, "env_placement": "remote"}},
        {"sampling": elsewhere, "fleet": {"workers": 0}},
    ):
        check_start(config(**sections), lambda step: None)
    steps: list[str] = []
    check_start(config(fleet={"check_env": False}), steps.append)
    assert steps == ["looking up what the config names"]
    assert "CartPol-v1" in mistake(fleet={"check_env": False}, sampling={"env": "CartPol-v1"})


@pytest.mark.processes
@pytest.mark.usefixtures("user_code")
def test_a_slow_env_is_logged_and_given_up_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(event_loop, "SAY_WAITING_S", 0.3)
    slow = config(sampling={"env": "user:slow", "env_reset_timeout_s": 0.05, "env_step_timeout_s": 0.15})
    with (
        RunDir(tmp_path / "run") as run_dir,
        StopSignals() as signals,
        ForkServer(child_environment(1)) as fork_server,
        caplog.at_level(logging.INFO, "headrace"),
    ):
        check_process.check_before_start(slow, run_dir, signals, fork_server)
        assert "waiting for the check before the start: building one env of 'user:slow'" in caplog.text
        monkeypatch.setattr(check_process, "_START_S", 0.0)
        with pytest.raises(HeadraceError, match=r"after 0\.3 s: 0\.3 s of 3 \* sampling\.env_reset") as caught:
            check_process.check_before_start(slow, run_dir, signals, fork_server)
    assert caught.value.exit_code == EnvError.exit_code


@pytest.mark.processes
@pytest.mark.usefixtures("user_code")
def test_an_env_that_leaves_a_thread_and_a_process_passes_and_both_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "leaving.py").write_text(LEAVING)
    with (
        RunDir(tmp_path / "run") as run_dir,
        StopSignals() as signals,
        ForkServer(child_environment(1)) as fork_server,
    ):
        check_process.check_before_start(config(sampling={"env": "leaving:make"}), run_dir, signals, fork_server)
    assert "env 'leaving:make' was reset and stepped, but its thread 'poller' would keep" in caplog.text
    assert "but its process 'simulator' would keep" in caplog.text


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("user_code")
def test_an_env_whose_first_step_hangs_ends_headrace_up_at_the_deadline_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(check_process, "_START_S", 0.0)
    limit_s = TIMEOUT_S / 10  # it begins to step within a second, where the machine is idle
    deadlines = {"env_reset_timeout_s": limit_s / 6, "env_step_timeout_s": limit_s / 2}
    sampling = {"env": "user:Faulty", "env_config": {"fault": "hang"}, **deadlines}
    said = rf"resetting and stepping that env of 'user:Faulty' once was not done after {limit_s:g} s"
    with (
        RunDir(tmp_path / "run") as run_dir,
        StopSignals() as signals,
        ForkServer(child_environment(1)) as fork_server,
        pytest.raises(HeadraceError, match=said) as caught,
    ):
        check_process.check_before_start(config(sampling=sampling), run_dir, signals, fork_server)
    assert caught.value.exit_code == EnvError.exit_code
