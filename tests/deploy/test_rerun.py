"""`headrace rerun`: planted crashes are found at their step, and an env that is not deterministic with its own."""

from __future__ import annotations

import gc
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.deploy.annexes.rerun.commands import verdict
from headrace.deploy.annexes.rerun.repeated import Repeated
from headrace.deploy.annexes.rerun.replay import is_same, repeat
from headrace.deploy.command.entry import INTERRUPTED
from headrace.schemas.errors import ConfigError, ExitCode, RunDirError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.reruns import episode_trail, failure_files
from headrace.workers.reruns.episode_trail import digests
from headrace.workers.reruns.failure_files import FailureFacts, KeptFailure, failures_of, read_failure, rerun_of
from headrace.workers.reruns.kept_failures import KeptFailures
from support.envs.planted import Planted, planted_step
from support.fleets.env_hosts import EnvHosts
from support.waiting import TIMEOUT_S, wait_until

ENV = "support.envs.planted:Planted"
KINDS = [
    ("raise", "inline"),
    ("shape", "inline"),
    ("raise", "process"),
    ("exit", "process"),
    ("segfault", "process"),
]


def config_of(kind: str, placement: str = "inline", env: str = ENV, **settings: Any) -> EnvRunnerConfig:
    env_config = {"kind": kind, **settings.pop("env_config", {})}
    given = {"num_envs": 3, "seed": 4, "rollout_fragment_length": 7, "env_restart_attempts": 1000, **settings}
    return EnvRunnerConfig(env=env, env_config=env_config, env_placement=placement, **given)


def failed(config: EnvRunnerConfig, run: Path, number: int) -> list[KeptFailure]:
    """Sample until so many failures are kept."""
    kind = MultiAgentEnvRunner if config.is_multi_agent else SingleAgentEnvRunner
    with kind(config, worker_index=2) as runner:
        runner.totals.kept = KeptFailures(run, 2, 0)
        while len(failures_of(run)) < number:
            runner.sample_fragment()
    return [read_failure(run, name) for name in failures_of(run)]


def repeated_of(config: EnvRunnerConfig, kept: KeptFailure, **options: Any) -> Repeated:
    return repeat(config, kept, CallMark(), **options)


@pytest.mark.parametrize(("kind", "placement"), KINDS)
def test_each_planted_crash_is_found_at_its_step(kind: str, placement: str, tmp_path: Path) -> None:
    config = config_of(kind, placement)
    crashes = failed(config, tmp_path, 5)
    assert any(kept.facts.steps > 2 * 7 for kept in crashes), "some steps were cut before the crash"
    for kept in crashes:
        assert kept.facts.steps == planted_step(kept.facts.seed or 0)
        assert len(kept.arrays["obs/near"]) == len(kept.arrays["rewards"]) == kept.facts.steps
        repeated = repeated_of(config, kept)
        assert (repeated.at, repeated.difference) == (f"step {kept.facts.steps}", "")
        assert repeated.error is not None
        assert is_same(kept.facts, repeated.error)
        assert verdict(kept.facts, repeated) == f"failed again at step {kept.facts.steps} with the same error"


@pytest.mark.parametrize(("kind", "placement"), KINDS)
def test_a_crash_among_agents_that_come_and_go_is_found_at_its_step(kind: str, placement: str, tmp_path: Path) -> None:
    policies = {"policies": {"one": {}, "two": {}}, "policy_mapping_fn": {"a": "one", "b": "two", "c": "one"}}
    config = config_of(kind, placement, env="support.envs.planted:PlantedTeam", **policies)
    crashes = failed(config, tmp_path, 6)
    assert kind in ("exit", "segfault") or any(kept.facts.steps > 27 for kept in crashes), (
        "agent a was done and cut before the crash"
    )
    for kept in crashes:
        assert kept.facts.steps == planted_step(kept.facts.seed or 0)
        repeated = repeated_of(config, kept)
        assert (repeated.at, repeated.difference) == (f"step {kept.facts.steps}", "")
        assert verdict(kept.facts, repeated) == f"failed again at step {kept.facts.steps} with the same error"
    others = {name: rows + 1 if name.startswith("1/obs") else rows for name, rows in crashes[0].arrays.items()}
    assert "of agent 'b'" in repeated_of(config, replace(crashes[0], arrays=others)).difference


def test_a_crash_in_a_process_at_its_own_pace_is_found_at_its_step(tmp_path: Path) -> None:
    config = config_of("raise", "process", envs_per_process=1, remote_env_batch_wait_ms=0.0)
    for kept in failed(config, tmp_path, 2):
        repeated = repeated_of(config, kept)
        assert (repeated.at, repeated.difference) == (f"step {planted_step(kept.facts.seed or 0)}", "")


def test_a_hang_is_found_at_its_step(tmp_path: Path) -> None:
    config = config_of("hang", "process", env_step_timeout_s=1.0)
    (kept,) = failed(config, tmp_path, 1)[:1]
    repeated = repeated_of(config, kept)
    assert (repeated.at, kept.facts.error) == (f"step {planted_step(kept.facts.seed or 0)}", "EnvHangError")
    assert repeated.error is not None
    assert is_same(kept.facts, repeated.error)


@pytest.mark.processes
def test_an_env_on_a_host_is_repeated_here(tmp_path: Path) -> None:
    with EnvHosts(tmp_path) as hosts:
        hosts.start(ENV, 2, "sampling.env_config.kind=segfault", slot=2)
        crashes = failed(config_of("segfault", "remote", num_envs=2, **hosts.at), tmp_path, 3)
    for kept in crashes:
        repeated = repeated_of(config_of("segfault", "remote", num_envs=2, **hosts.at), kept)
        assert (repeated.at, repeated.difference) == (f"step {planted_step(kept.facts.seed or 0)}", "")
        assert verdict(kept.facts, repeated).endswith("with the same error")


@pytest.mark.parametrize("env", [ENV, "support.envs.planted:PlantedTeam"])
@pytest.mark.parametrize(("kind", "placement"), [("raise", "inline"), ("segfault", "process")])
def test_a_film_shows_the_episode_up_to_its_crash(env: str, kind: str, placement: str, tmp_path: Path) -> None:
    reason = "imageio-ffmpeg is not installed; pip install 'headrace[video]'"
    ffmpeg = str(pytest.importorskip("imageio_ffmpeg", reason=reason).get_ffmpeg_exe())
    several = {"policies": {"shared": {}}} if env != ENV else {}
    kept = failed(config_of(kind, placement, env, **several), tmp_path, 1)[0]
    told = rerun_of_run(tmp_path, kind, placement, *set_policies(several), "--render", "out.mp4", env=env)
    assert f"out.mp4: {kept.facts.steps} pictures" in told.stdout, told.stderr
    assert told.returncode == 0
    command = [ffmpeg, "-loglevel", "error", "-i", "out.mp4", "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S, cwd=tmp_path).stdout
    shown = np.frombuffer(raw, np.uint8).reshape(-1, 32 * 48).mean(1)
    assert np.allclose(shown, 4 * np.arange(kept.facts.steps), atol=6)


def set_policies(settings: dict[str, Any]) -> list[str]:
    return ["--set", 'sampling.policies={"shared": {}}'] if settings else []


def rerun_of_run(
    run: Path, kind: str, placement: str, *arguments: str, env: str = ENV, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Call the command for a run directory without settings."""
    settings = [f"sampling.env_config.kind={kind}", f"sampling.env_placement={placement}"]
    flags = [part for setting in settings for part in ("--set", setting)]
    return headrace("rerun", str(run), "--env", env, *flags, *arguments, stdin=stdin, cwd=run)


def test_the_debugger_stops_before_a_step_that_ends_the_process(tmp_path: Path) -> None:
    kept = failed(config_of("segfault", "process"), tmp_path, 1)[0]
    stdin = "p 'stands', call.__self__._step\ns\ns\nn\nn\np 'entered', self._step\nq\n"
    told = rerun_of_run(tmp_path, "segfault", "process", "--pdb", stdin=stdin)
    steps = kept.facts.steps
    assert f"stops before step {steps} of episode {kept.facts.episode_id}" in told.stdout
    assert f"('stands', {steps - 1})" in told.stdout, told.stdout + told.stderr
    assert f"('entered', {steps})" in told.stdout
    assert told.stdout.endswith(f"the debugger was left at step {steps}\n")
    assert told.returncode == 1
    fatal = rerun_of_run(tmp_path, "segfault", "process", "--pdb", stdin="c\n")
    assert fatal.returncode == -signal.SIGSEGV


def test_a_rerun_that_hangs_says_at_which_step_and_can_be_interrupted(tmp_path: Path) -> None:
    kept = failed(config_of("hang", "process", env_step_timeout_s=1.0), tmp_path, 1)[0]
    script = (
        "import headrace.deploy.annexes.rerun.repeated as repeated; repeated.SAY_INTERVAL_S = 0.5; "
        "from headrace.deploy.command.entry import main; main()"
    )
    words = f"step {kept.facts.steps} has not returned for"
    flags = ["--set", "sampling.env_config.kind=hang", "--set", "sampling.env_step_timeout_s=1000"]
    for placement in ("inline", "process"):
        flags += ["--set", f"sampling.env_placement={placement}"]
        command = [sys.executable, "-c", script, "rerun", str(tmp_path), "--env", ENV, *flags]
        with (tmp_path / "log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_until(lambda: (tmp_path / "log").read_text().count(words) == 2, what="a word on it, again")
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == INTERRUPTED
        finally:
            process.kill()
        assert f"interrupted at step {kept.facts.steps}" in (tmp_path / "log").read_text()


def test_an_env_that_is_not_deterministic_is_named_with_its_step(tmp_path: Path) -> None:
    config = config_of("raise", env_config={"noisy_from": 5})
    crashes = [kept for kept in failed(config, tmp_path, 4) if kept.facts.steps > 12]
    assert crashes
    for kept in crashes:
        repeated = repeated_of(config, kept)
        assert repeated.differs_at == "step 5"
        assert repeated.difference.startswith("observation far: ")
        assert "the env is not deterministic" in verdict(kept.facts, repeated)
        assert repeated.at == f"step {kept.facts.steps}", "it goes on to the failure"


def test_a_reward_that_is_not_the_workers_is_named_with_its_step(tmp_path: Path) -> None:
    config = config_of("raise", env_to_module=["headrace.workers.connectors:MeanStd"], env="support.envs.planted:near")
    kept = next(kept for kept in failed(config, tmp_path, 3) if kept.facts.steps > 5)
    assert not any(name.startswith("obs") for name in kept.arrays), "the module saw others than the env gave"
    assert repeated_of(config, kept).difference == ""
    others = kept.arrays["rewards"].copy()
    others[3] += 1.0
    repeated = repeated_of(config, replace(kept, arrays={**kept.arrays, "rewards": others}))
    assert (repeated.differs_at, repeated.difference[:7]) == ("step 4", "reward ")


class Pair(VectorEnv):
    """Planted envs that step together."""

    def __init__(self, context: Any) -> None:
        self._config, self.envs = context, [Planted(context) for _ in range(context.num_envs)]
        super().__init__(self.envs[0].observation_space, self.envs[0].action_space, context.num_envs)

    def reset_at(self, index: int | None = None, *, seed: int | None = None, options: Any = None) -> Any:
        return self.envs[index or 0].reset(seed=seed, options=options)

    def restart_at(self, index: int | None = None) -> None:
        self.envs[index or 0] = Planted(self._config)

    def vector_step(self, actions: Sequence[Any]) -> Any:
        rows = [self._step(env, action) for env, action in zip(self.envs, actions, strict=True)]
        return tuple(zip(*rows, strict=True))

    def _step(self, env: Planted, action: Any) -> Any:
        if action is None:
            return None, 0.0, False, False, {}
        try:
            return env.step(action)
        except ValueError as error:
            return error, 0.0, True, False, {}


def test_one_env_of_a_vector_is_repeated_alone(tmp_path: Path) -> None:
    config = config_of("raise").model_copy(update={"env": Pair})
    crashes = failed(config, tmp_path, 4)
    assert {kept.facts.lane for kept in crashes} != {0}
    for kept in crashes:
        repeated = repeated_of(config, kept)
        assert (repeated.at, repeated.difference) == (f"step {planted_step(kept.facts.seed or 0)}", "")


@pytest.mark.filterwarnings("ignore:.*Received the following error", "ignore:.*Raising the last", "ignore:.*Traceback")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_env_of_a_vector_that_headrace_makes_is_repeated_alone(mode: str, tmp_path: Path) -> None:
    config = config_of("raise", gym_env_vectorize_mode=mode)
    crashes = failed(config, tmp_path, 6)
    assert {kept.facts.lane for kept in crashes} != {0}
    for kept in crashes:
        assert kept.facts.steps == planted_step(kept.facts.seed or 0), "the env that failed, and not its neighbour"
        repeated = repeated_of(config, kept)
        assert (repeated.at, repeated.difference) == (f"step {kept.facts.steps}", "")
        assert verdict(kept.facts, repeated).endswith("with the same error")


@pytest.mark.parametrize("kind", ["raise", "shape"])
def test_a_native_vector_keeps_no_failure_that_cannot_be_repeated(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, gym_env_vectorize_mode="sync")  # it finds the bad shape once all envs have stepped
    if kind == "raise":
        config = config_of(kind).model_copy(update={"env": sync_vector})
    with SingleAgentEnvRunner(config) as runner:
        runner.totals.kept = KeptFailures(tmp_path, 0, 0)
        while not runner.totals.env_failures:
            runner.sample_fragment()
    assert failures_of(tmp_path) == []


def sync_vector(context: Any) -> Any:
    return gym.vector.SyncVectorEnv([lambda: Planted(context)] * context.num_envs)


def test_steps_that_a_worker_no_longer_keeps_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("raise")
    monkeypatch.setattr(episode_trail, "MOST_BYTES", 2000)
    kept = next(kept for kept in failed(config, tmp_path, 9) if 7 < kept.facts.steps < 21 and not kept.facts.problem)
    assert len(kept.arrays["obs/far"]) < kept.facts.steps, "observations go first"
    assert (repeated_of(config, kept).at, repeated_of(config, kept).difference) == (f"step {kept.facts.steps}", "")
    monkeypatch.setattr(episode_trail, "MOST_BYTES", 100)
    (long,) = [kept for kept in failed(config, tmp_path / "b", 9) if kept.facts.steps > 30][:1]
    with pytest.raises(ConfigError, match="its first steps are no longer known"):
        repeated_of(config, long)


def test_an_episode_without_end_keeps_few_cuts_and_drops_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops, drop = [0], episode_trail._Cut.drop

    def counted(cut: episode_trail._Cut, *, all_steps: bool) -> None:
        drops[0] += 1
        drop(cut, all_steps=all_steps)

    monkeypatch.setattr(episode_trail._Cut, "drop", counted)
    monkeypatch.setattr(episode_trail, "MOST_BYTES", 100_000)
    endless = config_of("", env="support.envs.counting:Counting", env_config={"length": 10**9})
    with SingleAgentEnvRunner(endless) as runner:
        runner.totals.kept = KeptFailures(tmp_path, 0, 0)
        for _ in range(600):
            runner.sample_fragment()
        assert 0 < drops[0] <= 2 * 600, "observations, then all steps"
        assert sum(type(one) is episode_trail._Cut for one in gc.get_objects()) < 300


def test_an_episode_without_a_seed_says_why_it_cannot_be_repeated(tmp_path: Path) -> None:
    config = config_of("raise", seed_every_episode=False)
    kept = next(
        kept for kept in failed(config.model_copy(update={"env": unseeded}), tmp_path, 25) if kept.facts.seed is None
    )
    with pytest.raises(ConfigError, match="set seed_every_episode = true"):
        repeated_of(config, kept)


def unseeded(env_config: Any) -> Any:
    class Unseeded(Planted):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=7 if seed is None else seed)

    return Unseeded(env_config)


def test_a_folder_keeps_the_newest_failures_in_bounded_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = some_facts(tmp_path)
    files, arrays = KeptFailures(tmp_path, 0, 1), {"rewards": np.zeros(1000)}
    monkeypatch.setattr(failure_files, "MOST_FILES", 3)
    commands = [files.put(told, arrays) for _ in range(5)]
    assert commands[-1] == f"headrace rerun {tmp_path} --failure 0-1-5"
    assert sorted(failures_of(tmp_path)) == ["0-1-3", "0-1-4", "0-1-5"]
    assert [rerun_of(tmp_path, slots) for slots in ([7, 0], [7])] == [commands[-1], ""], "for `headrace why`"
    monkeypatch.setattr(failure_files, "MOST_BYTES", 100_000)
    monkeypatch.setattr(failure_files, "MOST_FILES", 100)
    for _ in range(20):
        files.put(told, arrays)
    assert len(failures_of(tmp_path)) in (11, 12)
    assert files.put(told, {"rewards": np.zeros(2000)}) == ""
    assert read_failure(tmp_path, failures_of(tmp_path)[0]).facts.problem
    (tmp_path / "failures" / "0-1-26.failure").write_bytes(b"torn")
    with pytest.raises(RunDirError, match="cannot be read"):
        read_failure(tmp_path, "0-1-26")
    with pytest.raises(ConfigError, match="--list"):
        read_failure(tmp_path, "../../secret")


@pytest.mark.parametrize("bound", ["files", "bytes"])
def test_an_env_that_fails_all_the_time_leaves_the_failures_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    told, arrays = some_facts(tmp_path), {"rewards": np.zeros(1000)}
    if bound == "files":
        monkeypatch.setattr(failure_files, "MOST_FILES", 11)
    else:
        monkeypatch.setattr(failure_files, "MOST_BYTES", 100_000)
    workers = [KeptFailures(tmp_path, slot, 0) for slot in range(2)]
    workers[0].put(told, arrays)
    for lane in (0, 1, 1, 2, 2, *[0] * 20):
        workers[1].put(told.model_copy(update={"lane": lane}), arrays)
    rare, frequent = ["0-0-1", "1-0-2", "1-0-3", "1-0-4", "1-0-5"], [f"1-0-{number}" for number in range(20, 26)]
    assert sorted(failures_of(tmp_path)) == sorted([*rare, *frequent])
    next_life = KeptFailures(tmp_path, 1, 1)
    for _ in range(30):
        next_life.put(told, arrays)
    assert {"0-0-1", "1-1-30"} < {*failures_of(tmp_path)}, "the one of the other worker, and the newest"
    assert len(next_life._lanes) <= 11
    monkeypatch.setattr(failure_files, "_newest_first", lambda _: [])
    assert next_life.put(told, arrays), "someone empties the folder meanwhile"


def some_facts(folder: Path) -> FailureFacts:
    return failed(config_of("raise"), folder / "other", 1)[0].facts


def test_digests_differ_where_one_byte_does() -> None:
    rows = np.zeros((200, 21), np.uint8)
    rows[np.arange(168), np.arange(168) // 8] = 1 << (np.arange(168) % 8)
    assert len({*digests(rows[:169]).tolist()}) == 169
    assert digests(rows[180:]).tolist() == [digests(rows[199:])[0]] * 20
    swapped = np.arange(16.0)[None]
    assert digests(swapped)[0] != digests(swapped[:, ::-1])[0]


def test_a_fleet_keeps_its_failures_and_names_the_command(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    settings = ["sampling.env_config.kind=raise", "logging.interval_s=1", "sampling.env_restart_attempts=1000"]
    flags = [part for setting in settings for part in ("--set", setting)]
    up = headrace("up", "--env", ENV, "--workers", "1", "--until-steps", "600", "--run-dir", str(run), *flags)
    assert up.returncode == 0, up.stderr
    text = (run / "logs" / "worker-0.log").read_text()
    (command, *_) = re.findall(r"to repeat it: headrace (rerun .*? --failure [-\d]+)", text)
    rerun = headrace(*shlex.split(command))
    assert rerun.returncode == 0, rerun.stderr
    assert re.search(r"failed again at step \d+ with the same error", rerun.stdout)
    assert "in _crash" in rerun.stdout, "the traceback"
    listed = headrace("rerun", str(run), "--list").stdout.splitlines()
    assert len(listed) == len(failures_of(run)) > 1
    kept = read_failure(run, failures_of(run)[-1])
    (episode,) = re.findall(rf"step {kept.facts.steps} of episode ({kept.facts.episode_id})", text)
    assert headrace("rerun", str(run), "--episode", episode).stdout.startswith(f"{kept.name}: ")
    unknown = headrace("rerun", str(run), "--episode", "00c0ffee")
    assert unknown.returncode == ExitCode.CONFIG
    assert f"headrace replay RECORDING --episode 00c0ffee --render F.mp4 --run-dir {run}" in unknown.stderr
    assert "begins the ids of several" in headrace("rerun", str(run), "--episode", episode[:16]).stderr
    debugged = headrace("rerun", str(run), "--pdb", stdin="p self._sum * 1000\nq\n")
    kept = read_failure(run, failures_of(run)[0])
    assert f"{1000 * int(kept.arrays['actions'].sum())}" in debugged.stdout, "it stands in the env's step"


@pytest.mark.processes
def test_an_inline_env_that_ends_its_worker_names_the_setting_that_keeps_its_episode(tmp_path: Path) -> None:
    run = tmp_path / "run"
    crash = ["--set", "sampling.env_config.kind=segfault", "--set", "supervisor.restart_attempts=0", "--workers", "1"]
    headrace("up", "--env", ENV, "--until-steps", "100000", "--run-dir", str(run), *crash)
    assert "SIGSEGV" in (run / "logs" / "supervisor.log").read_text()
    told = headrace("rerun", str(run))
    assert told.returncode == ExitCode.CONFIG
    assert "None is kept of an inline env that ended its worker" in told.stderr
    assert 'with sampling.env_placement = "process" the next one is' in told.stderr


def headrace(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, input=stdin, cwd=cwd)
