"""The PPO of the guide on a fleet, beside the same updates on the steps of gymnasium's `SyncVectorEnv`.

python -m bench.own_ppo [--env Pendulum-v1] [--seeds 3] [--steps 100000] [--arms fleet bare] [--json FILE], in tests/

The program is the block of `docs/guides/learner-programs.md`; for Pendulum-v1 some constants are those of the recipe.
All arms have 16 envs. Each is measured at the same number of steps that were trained on:

- fleet: two workers, and the ratio to the weights that acted.
- own: the same, with the ratio to the learner's weights before the update.
- synchronous: as fleet, in synchronous sampling.
- bare: a loop that steps its envs, then trains, in this process.

The return is the mean of the newest 100 episodes. The wall time of a fleet counts from the moment at which its stream
knows the spaces; the seconds before stand apart. Wall times hold on an idle machine only; returns hold on any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from documentation.blocks import Page

from headrace.learner_stub import EpisodeStream, to_torch, with_own_logp
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.episodes import Episodes
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.modules import actor_critic

GUIDE = Path(__file__).parents[2] / "docs/guides/learner-programs.md"
ENVS = 16
CONSTANTS: dict[str, dict[str, float]] = {
    "CartPole-v1": {},
    "Pendulum-v1": {"STEPS": 2048, "EPOCHS": 10, "LEARNING_RATE": 0.0013, "GAMMA": 0.9, "GAE_LAMBDA": 0.95},
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training: `mean_return` is that of the newest 100 episodes, `best` the best such mean.

    `start_s` is what the fleet takes to start, before `wall_s`.
    """

    arm: str
    seed: int
    steps: int
    mean_return: float
    best: float
    wall_s: float
    start_s: float = 0.0


class Returns:
    """The returns of episodes, and the best mean of 100."""

    def __init__(self) -> None:
        self.newest = deque[float](maxlen=100)
        self.best = -float("inf")

    def add(self, episode_return: float) -> None:
        self.newest.append(episode_return)
        if len(self.newest) == 100:
            self.best = max(self.best, self.mean)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.newest) if self.newest else float("nan")


def program(env: str) -> ModuleType:
    """Return the guide's program as a module, with the constants of `env`."""
    module = ModuleType("ppo")
    exec(Page(GUIDE).block_with("def train(module, optimizer, episodes)"), vars(module))  # noqa: S102 - our own page
    vars(module).update(CONSTANTS[env])
    return module


def of_fleet(arm: str, env: str, seed: int, steps: int) -> Run:
    """Train on a fleet of two workers."""
    ppo, returns = program(env), Returns()
    began = []

    def built(spaces: Any) -> Any:
        began.append(time.monotonic())
        return actor_critic(spaces, seed=seed)

    def seen(module: Any, batch: ChunkBatch) -> ChunkBatch:
        for chunk in batch:
            if chunk.is_done:
                returns.add(chunk.episode_return)
        own = with_own_logp(module, batch)
        if arm != "own" or not own.steps:
            return own
        return replace(own, arrays={**own.arrays, "behaviour_logp": own.columns["logp"]})

    vars(ppo).update(with_own_logp=seen, actor_critic=built, save_policy=lambda *_, **__: None)
    if arm == "synchronous":
        ppo.EpisodeStream = _Synchronous
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headrace.deploy", "up", "--env", env, "--workers", "2", "-q"]
        command += ["--num-envs", str(ENVS // 2), "--seed", str(seed), "--run-dir", folder]
        command += ["--set", "learner.enabled=false", "--set", f"sampling.rollout_fragment_length={_length(ppo)}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as fleet:
            try:
                torch.manual_seed(seed)
                start = time.monotonic()
                ppo.main(folder, steps)
                ended = time.monotonic()
            finally:
                fleet.terminate()
    return Run(arm, seed, steps, returns.mean, returns.best, ended - began[0], began[0] - start)


class _Synchronous:
    @staticmethod
    def of(run_dir: str, **options: Any) -> EpisodeStream:
        return EpisodeStream.of(run_dir, synchronous=True, **options)


def of_bare(arm: str, env: str, seed: int, steps: int) -> Run:
    """Train in a loop that steps its envs by itself."""
    ppo, returns = program(env), Returns()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start = time.monotonic()
    same_step = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(env)] * ENVS, autoreset_mode=same_step)
    module = actor_critic(spaces_of(envs.envs[0]), seed=seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=ppo.LEARNING_RATE, eps=1e-5)
    obs, _ = envs.reset(seed=seed)
    sums, trained = np.zeros(ENVS), 0
    while trained < steps:
        rows: list[list[Any]] = [[] for _ in range(ENVS)]  # of each env: obs, action, reward, final obs, terminated
        for _ in range(ppo.STEPS // ENVS):
            noise = torch.rand if module.noise_kind == "uniform" else torch.randn
            given = torch.from_numpy(obs.astype(np.float32))
            answer = module.forward_exploration({"obs": given, "noise": noise(ENVS, module.noise_size)})
            actions, for_env = (np.asarray(answer.get(n, answer["actions"])) for n in ("actions", "actions_for_env"))
            before = obs
            obs, rewards, terminated, truncated, infos = envs.step(for_env)
            sums += rewards
            for i in range(ENVS):
                done = bool(terminated[i] or truncated[i])
                after = infos["final_obs"][i] if done else obs[i]
                rows[i].append((before[i], actions[i], rewards[i], after, bool(terminated[i]), done))
                if done:
                    returns.add(float(sums[i]))
                    sums[i] = 0.0
        ppo.train(module, optimizer, _own(module, _episodes(rows)))
        trained += ppo.STEPS
    envs.close()
    return Run(arm, seed, steps, returns.mean, returns.best, time.monotonic() - start)


def _episodes(rows: list[list[Any]]) -> Episodes:
    """Return the steps of all envs: a chunk for each part of an episode."""
    chunks: list[list[Any]] = []
    for own in rows:
        chunks.append([])
        for row in own:
            chunks[-1].append(row)
            if row[-1]:
                chunks.append([])
    chunks = [chunk for chunk in chunks if chunk]
    lengths = np.array([len(chunk) for chunk in chunks])
    offsets, number = np.append(0, np.cumsum(lengths)), np.arange(len(chunks))
    return Episodes(
        obs=np.array([row[0] if at < 2 else row[3] for at, row in _observed(chunks)], np.float32),
        actions=np.array([row[1] for chunk in chunks for row in chunk]),
        rewards=np.array([row[2] for chunk in chunks for row in chunk], np.float64),
        columns={},
        offsets=offsets,
        step_rows=np.arange(offsets[-1]) + np.repeat(number, lengths),
        last_rows=offsets[1:] + number,
        terminated=np.array([chunk[-1][4] for chunk in chunks]),
        truncated=np.array([chunk[-1][5] and not chunk[-1][4] for chunk in chunks]),
        next_chunk=np.full(len(chunks), -1),
        state_in={},
    )


def _observed(chunks: list[list[Any]]) -> list[tuple[int, Any]]:
    return [pair for chunk in chunks for pair in [*((0, row) for row in chunk), (2, chunk[-1])]]


def _own(module: Any, episodes: Episodes) -> Any:
    """Return `episodes` as tensors, with the columns that the guide's `train` reads."""
    told = to_torch(episodes)
    with torch.no_grad():
        answer = module.forward_train({"obs": told.obs})
    values = answer["values"]
    logp = module.logp(answer["action_dist_inputs"][told.step_rows], told.actions)
    columns = {
        "logp": logp,
        "behaviour_logp": logp,
        "values": values[told.step_rows],
        "next_values": values[told.step_rows + 1],
    }
    return replace(told, arrays=columns)


def _length(ppo: ModuleType) -> int:
    """Return the steps of one env in a batch: a quarter of the update from each of two workers."""
    return int(max(8, ppo.STEPS // ENVS // 2))


ARMS = {"fleet": of_fleet, "own": of_fleet, "synchronous": of_fleet, "bare": of_bare}


def main() -> None:
    """Train each arm with each seed in turns, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(CONSTANTS), default="Pendulum-v1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["fleet", "bare"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = []
    for seed in range(1, args.seeds + 1):
        for arm in args.arms:
            runs.append(run := ARMS[arm](arm, args.env, seed, args.steps))
            print(
                f"{args.env} seed {seed} {arm:<12} {run.steps:>8,} steps  mean return {run.mean_return:8.1f}  "
                f"best {run.best:8.1f}  {run.wall_s:6.1f} s after {run.start_s:.1f} s",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")


if __name__ == "__main__":
    main()
