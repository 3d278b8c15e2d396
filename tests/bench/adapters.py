"""CartPole-v1 and Pendulum-v1 learned through each adapter, by blocks of docs/guides/adapters.md and env-loops.md.

PYTHONPATH=tests python -m bench.adapters [ARM ...] [--seeds 1 2 3] [--rows FILE] [--table]

Each arm runs a block of the page as it stands, except for the settings of its learner, its env and its directory. One
worker, or one process of envs, is killed by SIGKILL in each run, and `headrace audit --strict` checks the books after
it. An arm "... alone" is the library without Headrace, with the same settings. An arm ends at its mark: a mean return
of the newest 100 episodes, of 10 for SAC. One whose library is missing is left out by name.

Each run adds a line of JSON to FILE. Then the table of all its lines is printed, in Markdown; --table only prints it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from documentation.blocks import Page
from documentation.test_adapters import LEARNERS, LOOPS, changed_program, env_process_of

from bench import adapter_collectors, adapter_learners, time_to_return
from bench.adapter_learners import Watch
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.adapters.torch_dataset import EpisodeDataset
from headrace.workers import EnvRunnerConfig, GymVectorEnv
from headrace.workers.modules import actor_critic
from support.fleets.running_fleet import RunningFleet

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
LIMIT_S = 1500.0
SIZES = {CARTPOLE: (8, 64), PENDULUM: (4, 512)}
"""The envs of a loop without a fleet, and the steps of each in an update."""
SEPARATE = ("--set", "module.config.vf_share_layers=false")
UNSQUASHED = ("--set", 'sampling.module_to_env=["headrace.workers.connectors:UnsquashActions"]')
SB3 = ("--set", "module.build=headrace.workers.modules.sb3:build")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one run: env steps and mean return at its end, and the number of killed processes."""

    env_steps: int
    mean_return: float
    killed: int = 0


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn one env; `train` takes a seed and the mark."""

    name: str
    env: str
    needs: str
    train: Callable[[int, float], Found]
    mark: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Seconds are those of a whole run, `cpu_s` the processor time of all its processes."""

    arm: str
    env: str
    seed: int
    mark: float
    env_steps: int
    mean_return: float
    killed: int
    seconds: float
    cpu_s: float


def changed(text: str, changes: Mapping[str, str]) -> str:
    """Return `text` with each key of `changes`, which must stand there once, replaced."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in:\n{text}"
        text = text.replace(old, new)
    return text


def on_a_fleet(
    env: str, options: Sequence[str], train: Callable[[Path, int, Watch], Any], kill_at: int, seed: int, mark: float
) -> Found:
    """Train on a fleet until it reaches the mark or `train` returns; kill worker 0 after `kill_at` steps.

    `train` returns (env steps, mean return), or None where the fleet judges the return.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        own = ("--env", env, "--workers", "2", "--seed", str(seed), "--timeout-s", str(LIMIT_S))
        with RunningFleet(run_dir, *own, "--set", "learner.enabled=false", *options) as fleet:
            fleet.wait_until((run_dir / "broker.json").exists, "a broker")
            watch = Watch(lambda: fleet.send(signal.SIGKILL, "worker", 0), kill_at)
            found = train(run_dir, seed, watch)
            if found is not None:
                fleet.terminate()
            result = fleet.finish(LIMIT_S)
            assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
            fleet.audited()
        steps, mean_return = found or (result["steps"], result["mean_return"])
        assert watch.killed, "the run ended before a worker was killed"
        assert result["restarts"]["worker"] >= 1
        return Found(steps, mean_return, 1)


def run_block(start: str, changes: Mapping[str, str], names: Mapping[str, Any], run_dir: Path | None = None) -> None:
    """Run the only block of its page that has a line which begins with `start`, with these names given.

    `run_dir` takes the place of the run directory of the page about learners; without it, the page is that about loops.
    """
    page = LEARNERS if run_dir else LOOPS
    code = changed(Page(page).block_with(start), changes)
    if run_dir is not None:
        code = re.sub(r'"runs/\w+"', repr(str(run_dir)), code)
    exec(compile(code, str(page), "exec"), dict(names))  # noqa: S102 - the page is our own


def torch_dataset(settings: adapter_learners.Settings, run_dir: Path, seed: int, watch: Watch) -> None:
    """Run the block of torch's DataLoader, until the fleet ends."""
    module = f"actor_critic(stream.spaces(timeout_s=120.0), vf_share_layers=False, seed={seed})"
    changes = {"actor_critic(stream.spaces())": module}
    run_block("    for steps in DataLoader(", changes, {"update": adapter_learners.TorchPPO(settings, watch)}, run_dir)


def torchrl(settings: adapter_learners.Settings, run_dir: Path, seed: int, watch: Watch) -> None:
    """Run the block of TorchRL, on policy: each batch is one rollout, in place of a sample of the buffer."""
    from headrace.learner_stub.adapters.tensor_dicts import to_tensordict

    module = f"    module = actor_critic(stream.spaces(timeout_s=120.0), vf_share_layers=False, seed={seed})\n"
    changes = {
        " as weights:\n": f" as weights:\n{module}",
        "EpisodeDataset(stream, to_tensordict)": "EpisodeDataset(stream, ending_chunks)",
        "        buffer.extend(steps)\n": "",
        "buffer.sample()": "steps",
    }
    names = {
        "EpisodeStream": EpisodeStream,
        "WeightPublisher": WeightPublisher,
        "EpisodeDataset": EpisodeDataset,
        "actor_critic": actor_critic,
        "ending_chunks": partial(to_tensordict, set_truncated=True),
        "update": adapter_learners.TorchRLPPO(settings, watch),
    }
    run_block("    for steps in EpisodeDataset(", changes, names, run_dir)


def rllib(learner: adapter_learners.RLlibLearner, run_dir: Path, seed: int, watch: Watch) -> None:
    """Run the block of RLlib."""
    with WeightPublisher.of(run_dir) as weights:
        learner.weights, learner.watch = weights, watch
        learner.publish()
        run_block("        learner.update(episodes=", {}, {"learner": learner}, run_dir)


def rllib_on_a_fleet(
    settings: adapter_learners.Settings, env: str, options: Sequence[str], seed: int, mark: float
) -> Found:
    """Train RLlib's learner on a fleet that acts with its layers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.npz"
        learner = adapter_learners.RLlibLearner(settings, env, file)
        layers = ("--set", "module.build=headrace.deploy.annexes.ray.rllib_policy:build")
        layers += ("--set", f"module.config.weights={file}")
        return on_a_fleet(env, (*options, *layers), partial(rllib, learner), 10_000, seed, mark)


def sb3(recipe: str, mark: float, run_dir: Path, seed: int, watch: Watch) -> tuple[int, float]:
    """Run the block of Stable-Baselines3 with its model of `recipe`; return env steps and mean return."""
    from bench import adapter_models

    model = adapter_models.make(recipe, seed, by_fleet=True)
    changes = {
        'PPO("MlpPolicy", "CartPole-v1", device="cpu")': "model",
        "print(steps)": "if enough.is_reached(model): break",
        "total_timesteps=10_000": f"total_timesteps={adapter_models.RECIPES[recipe].steps}",
        "cartpole.zip": str(run_dir / "model.zip"),
    }
    names = {"model": model, "enough": adapter_models.Enough(mark, watch)}
    run_block("from headrace.learner_stub.adapters.sb3 import save_sb3_policy, updates", changes, names, run_dir)
    return model.num_timesteps, adapter_models.mean_return(model)


def sb3_on_a_fleet(recipe: str, options: Sequence[str], seed: int, mark: float) -> Found:
    """Train a model of Stable-Baselines3 on a fleet."""
    from bench import adapter_models

    own = adapter_models.RECIPES[recipe]
    layers = adapter_models.module_options(recipe)
    return on_a_fleet(own.env, (*options, *layers), partial(sb3, recipe, mark), own.steps // 20, seed, mark)


def sb3_alone(recipe: str, seed: int, mark: float) -> Found:
    """Train the model of `recipe` by its own `learn`."""
    from bench import adapter_models

    model = adapter_models.make(recipe, seed)
    model.learn(adapter_models.RECIPES[recipe].steps, callback=adapter_models.Enough(mark))
    return Found(model.num_timesteps, adapter_models.mean_return(model))


def sb3_vec_env(recipe: str, seed: int, mark: float) -> Found:
    """Run the block of `SB3VecEnv`, and kill its process of envs."""
    from bench import adapter_models

    own = adapter_models.RECIPES[recipe]
    watch = Watch(lambda: os.kill(env_process_of(os.getpid()), signal.SIGKILL), own.steps // 20)
    enough = adapter_models.Enough(mark, watch)
    changes = {
        'env="CartPole-v1", num_envs=4': f"env={own.env!r}, num_envs={own.num_envs}, seed={seed}",
        'PPO("MlpPolicy", with_returns, n_steps=64, device="cpu")': "make(with_returns)",
        "model.learn(512)": f"model.learn({own.steps}, callback=enough)",
    }
    make = partial(adapter_models.make, recipe, seed)
    names = {"EnvRunnerConfig": EnvRunnerConfig, "enough": enough, "make": lambda envs: make(envs=envs)}
    run_block("with_returns = VecMonitor(", changes, names)
    assert watch.killed, "the run ended before a process of envs was killed"
    return Found(enough.model.num_timesteps, adapter_models.mean_return(enough.model), 1)


def cleanrl(seed: int, mark: float) -> Found:
    """Run the program in CleanRL's form after the page's diff, and kill its process of envs."""
    newest: list[float] = []
    steps, killed = 0, 0
    with tempfile.TemporaryDirectory() as folder, changed_program(Path(folder), "--seed", str(seed)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if told := time_to_return.episode_of(line):
                steps, newest = told[0], [*newest[-99:], told[1]]
            if steps > 10_000 and not killed:
                killed = env_process_of(process.pid)
                os.kill(killed, signal.SIGKILL)
            if len(newest) == 100 and statistics.mean(newest) >= mark:
                break
    return Found(steps, statistics.mean(newest), 1)


def cleanrl_alone(seed: int, mark: float) -> Found:
    """Run CleanRL's form with gymnasium's own vector."""
    run = time_to_return.of_peer("cleanrl", sys.executable, CARTPOLE)(seed)
    return Found(run.env_steps, run.mean_return)


def own_loop(
    train: Callable[[adapter_collectors.Loop], tuple[int, float]],
    env: str,
    size: tuple[int, int],
    seed: int,
    mark: float,
) -> Found:
    """Train by a library's own loop over its envs; `size` is how many, and the steps of each in an update."""
    settings = {CARTPOLE: adapter_learners.CARTPOLE, PENDULUM: adapter_learners.PENDULUM}[env]
    return Found(*train(adapter_collectors.Loop(env, *size, settings, seed, mark)))


def vector_loop(env: str, size: tuple[int, int], seed: int, mark: float) -> Found:
    """Train by the loop of torch alone on a `GymVectorEnv` in its place, and kill its process of envs."""
    watch = Watch(lambda: os.kill(env_process_of(os.getpid()), signal.SIGKILL), 10_000)

    def vector(loop: adapter_collectors.Loop) -> GymVectorEnv:
        own = {"env": "bench.adapter_collectors:made_of", "env_config": {"env": loop.env}}
        return GymVectorEnv(EnvRunnerConfig(**own, num_envs=loop.num_envs, env_placement="process"))

    found = own_loop(partial(adapter_collectors.torch_loop, vector=vector, watch=watch), env, size, seed, mark)
    assert watch.killed, "the run ended before a process of envs was killed"
    return replace(found, killed=1)


def arms() -> list[Arm]:
    """Return all arms, each beside its library alone."""
    sampled = {
        CARTPOLE: ("--num-envs", "8", "--set", "sampling.rollout_fragment_length=64"),
        PENDULUM: ("--num-envs", "4", "--set", "sampling.rollout_fragment_length=512", *UNSQUASHED),
    }
    until = {env: (*sampled[env], "--until-return", str(mark)) for env, mark in time_to_return.GOALS.items()}
    settings = {CARTPOLE: adapter_learners.CARTPOLE, PENDULUM: adapter_learners.PENDULUM}
    found = []
    for name, needs, learner in (("torch DataLoader", "torch", torch_dataset), ("TorchRL PPO", "torchrl", torchrl)):
        for env, mark in time_to_return.GOALS.items():
            train = partial(on_a_fleet, env, (*until[env], *SEPARATE), partial(learner, settings[env]), 10_000)
            found.append(Arm(name, env, needs, train, mark))
    for env, mark in time_to_return.GOALS.items():
        # Ray has tensorboardX with `ray[rllib]` alone, without which RLlib cannot be imported.
        found.append(
            Arm("RLlib PPO", env, "tensorboardX", partial(rllib_on_a_fleet, settings[env], env, until[env]), mark)
        )
    for name, needs, loop in (
        ("torch DataLoader", "torch", adapter_collectors.torch_loop),
        ("TorchRL PPO", "torchrl", adapter_collectors.torchrl_collector),
        ("RLlib PPO", "tensorboardX", adapter_collectors.rllib_runner),
    ):
        for env, size in SIZES.items():
            alone = partial(own_loop, loop, env, size)
            found.append(Arm(f"{name} alone", env, needs, alone, time_to_return.GOALS[env]))
    for recipe, env, mark, options in (
        ("PPO", CARTPOLE, 475.0, ("--num-envs", "4", "--set", "sampling.rollout_fragment_length=32")),
        ("PPO", PENDULUM, -200.0, ("--num-envs", "2", "--set", "sampling.rollout_fragment_length=128")),
        ("SAC", PENDULUM, -200.0, ("--num-envs", "1", "--set", "sampling.rollout_fragment_length=8")),
        ("DQN", CARTPOLE, 200.0, ("--num-envs", "1", "--set", "sampling.rollout_fragment_length=32")),
    ):
        key = f"{recipe} {env}"
        own = (*options, *SB3, "--set", f'module.config.algorithm="{recipe}"')
        found.append(Arm(f"SB3 {recipe}", env, "stable_baselines3", partial(sb3_on_a_fleet, key, own), mark))
        found.append(Arm(f"SB3 {recipe} alone", env, "stable_baselines3", partial(sb3_alone, key), mark))
        if recipe == "PPO":
            found.append(Arm("SB3VecEnv", env, "stable_baselines3", partial(sb3_vec_env, key), mark))
    for env, size in SIZES.items():
        found.append(Arm("GymVectorEnv", env, "torch", partial(vector_loop, env, size), time_to_return.GOALS[env]))
    found.append(Arm("CleanRL's form", CARTPOLE, "torch", cleanrl, 475.0))
    found.append(Arm("CleanRL's form alone", CARTPOLE, "torch", cleanrl_alone, 475.0))
    return found


def measured(arm: Arm, seed: int) -> Run:
    """Run an arm once."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start, spent = time.monotonic(), _cpu_s()
    found = arm.train(seed, arm.mark)
    seconds, cpu_s = time.monotonic() - start, _cpu_s() - spent
    own = (found.env_steps, round(found.mean_return, 1), found.killed)
    return Run(arm.name, arm.env, seed, arm.mark, *own, round(seconds, 1), round(cpu_s, 1))


def table(runs: Sequence[Run]) -> str:
    """Return a table in Markdown: env steps of each seed, and those of the library alone; "-" if it missed the mark."""
    lines = [
        "| adapter | env | env steps, by seed | the library alone | processor time, by seed |",
        "|---|---|---|---|---|",
    ]
    for arm, env in dict.fromkeys((run.arm, run.env) for run in runs if not run.arm.endswith(" alone")):
        library = {"SB3VecEnv": "SB3 PPO", "GymVectorEnv": "torch DataLoader"}.get(arm, arm)
        own, alone = (_of(runs, name, env) for name in (arm, f"{library} alone"))
        cpu = ", ".join(f"{run.cpu_s:,.0f}" for run in own) + " s"
        lines.append(f"| {arm} | {env} | {_steps(own)} | {_steps(alone)} | {cpu} |")
    return "\n".join(lines)


def _of(runs: Sequence[Run], arm: str, env: str) -> list[Run]:
    return sorted((run for run in runs if (run.arm, run.env) == (arm, env)), key=lambda run: run.seed)


def _steps(runs: Sequence[Run]) -> str:
    return ", ".join(
        f"{run.env_steps:,}" if run.mean_return >= run.mark else f"- ({run.mean_return:,.0f} after {run.env_steps:,})"
        for run in runs
    )


def main() -> None:
    """Run what was asked for, and print the table."""
    known = {f"{arm.name} {arm.env}": arm for arm in arms()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*known, []], help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=Path, default=Path("bench-results/adapters.jsonl"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    for seed in [] if args.table else args.seeds:
        for arm in (known[name] for name in args.arms or known):
            if importlib.util.find_spec(arm.needs) is None:
                print(f"without {arm.name}: {arm.needs} is not installed", file=sys.stderr)
                continue
            run = measured(arm, seed)
            print(run, file=sys.stderr, flush=True)
            with args.rows.open("a") as rows:
                rows.write(json.dumps(asdict(run)) + "\n")
    print(table([Run(**json.loads(line)) for line in args.rows.read_text().splitlines()]))


def _cpu_s() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
