"""The cost of each adapter for a step, as a share of what the fleet spends on a step.

`stream` is the fleet of the bench `pipeline`, whose learner reads an `EpisodeStream` and counts. The batches that it
reads are recorded. The arms have the adapter's own processor time for the same batches added, in batches of 512 steps.
`SB3 fill` fills a rollout of 2048 steps. An adapter whose library is missing is left out by name.

An untrained policy ends an episode of CartPole after some 20 steps, and RLlib's episode is an object with some ten
buffers for each chunk. `RLlib alone` is the time of its constructors, given the arrays: no adapter takes less, so RLlib
has no mark there. Chunks of Pendulum are as long as its fragments; there it has the mark.

PYTHONPATH=tests python -m bench.run --only adapter_costs
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any

import torch
from stable_baselines3 import DQN, PPO

from bench.limits import ENV
from bench.pipeline import HORIZON, WORKERS, Fleet
from bench.processes import Processes
from bench.table import Row, rows_of
from bench.turns import Turn, turn
from headrace.learner_stub.adapters import sb3
from headrace.learner_stub.adapters.rllib import to_episodes
from headrace.learner_stub.adapters.torch_dataset import transition_tensors
from headrace.schemas.chunks.batch import ChunkBatch

WIDTH, ROLLOUT, RECORDED = 8, 2048, 32
MARK = 0.95
LONG_ENV = "Pendulum-v1"
"""An env whose episodes, of 200 steps, are cut into chunks of a whole fragment."""
Convert = Callable[[Sequence[Any]], Any]


def measure(seconds: float, rounds: int) -> list[Row]:
    """Measure each adapter on CartPole's chunks, and RLlib's on Pendulum's too, which are longer."""
    torch.set_num_threads(1)
    arms = adapters()
    rows = measure_on(ENV, arms, arms.keys() - {"RLlib"}, seconds, rounds)
    if "RLlib" in arms:
        rows += measure_on(LONG_ENV, {"RLlib": arms["RLlib"]}, {"RLlib"}, seconds, rounds)
    return rows


def measure_on(env: str, arms: Mapping[str, Convert], marked: Set[str], seconds: float, rounds: int) -> list[Row]:
    """Measure the bare stream, and after it each adapter on what was recorded, round by round."""
    with Processes() as processes, Fleet(WIDTH, processes, env=env) as fleet:
        recorded = [fleet.batch() for _ in range(RECORDED)]
        inputs: dict[str, Sequence[Any]] = dict.fromkeys(arms, recorded)
        if "RLlib" in arms:
            arms = {**arms, "RLlib alone": partial(_each, Parts.build)}
            inputs["RLlib alone"] = [Parts.of(batch) for batch in recorded]
        turns = []
        for _ in range(rounds):
            bare = turn(fleet, seconds)
            costs = {name: cost(convert, inputs[name], seconds / 4) for name, convert in arms.items()}
            turns.append({"stream": bare} | {name: with_cost(bare, own) for name, own in costs.items()})
    case = f"{env}, {WORKERS} workers, {WIDTH} envs each, {WIDTH * HORIZON} steps a batch"
    return rows_of("adapter_costs", case, "env steps/s", turns, "stream", dict.fromkeys(marked, MARK))


@dataclass(frozen=True, slots=True)
class Parts:
    """The arguments of RLlib's constructors for the episodes of one batch."""

    steps: int
    episodes: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
    """Plain arguments, the data of the buffers, and the data of those in `extra_model_outputs`."""

    @classmethod
    def of(cls, batch: ChunkBatch) -> Parts:
        """Take the episodes of `batch` apart."""
        plain = {"id_": "id_", "t_started": "t_started", "terminated": "is_terminated", "truncated": "is_truncated"}
        plain |= {name: name for name in ("observation_space", "action_space")}
        buffers = ("observations", "infos", "actions", "rewards")
        return cls(
            batch.steps,
            [
                (
                    {argument: getattr(episode, name) for argument, name in plain.items()},
                    {name: getattr(episode, name).data for name in buffers},
                    {name: buffer.data for name, buffer in episode.extra_model_outputs.items()},
                )
                for episode in to_episodes(batch)
            ],
        )

    def build(self) -> list[Any]:
        """Build the episodes by RLlib's constructors."""
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode
        from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer as Buffer

        return [
            SingleAgentEpisode(
                **plain,
                **{name: Buffer(data) for name, data in buffers.items()},
                extra_model_outputs={name: Buffer(data) for name, data in outputs.items()},
            )
            for plain, buffers, outputs in self.episodes
        ]


def adapters() -> dict[str, Convert]:
    """Return what each adapter does with some batches."""
    ppo = PPO("MlpPolicy", ENV, device="cpu")
    dqn = DQN("MlpPolicy", ENV, buffer_size=100_000, device="cpu")
    arms: dict[str, Convert] = {
        "DataLoader": partial(_each, transition_tensors),
        "SB3 fill": partial(sb3.fill, ppo),
        "SB3 store": partial(_each, lambda batch: sb3.store(dqn, batch.transitions())),
    }
    if importlib.util.find_spec("torchrl"):
        from headrace.learner_stub.adapters.tensor_dicts import to_tensordict

        arms["TorchRL"] = partial(_each, to_tensordict)
    if importlib.util.find_spec("tensorboardX"):  # Ray has it with `ray[rllib]` alone
        arms["RLlib"] = partial(_each, to_episodes)
    if missing := {"TorchRL", "RLlib"} - arms.keys():
        print(f"without {', '.join(sorted(missing))}: not installed", file=sys.stderr)
    return arms


def _each(convert: Callable[[Any], Any], batches: Sequence[Any]) -> None:
    for batch in batches:
        convert(batch)


def cost(convert: Convert, recorded: Sequence[Any], seconds: float) -> float:
    """Return the processor time in seconds for one step. All of it is this thread's."""
    size = ROLLOUT // (WIDTH * HORIZON)
    parts = [recorded[at : at + size] for at in range(0, len(recorded), size)]
    convert(parts[0])
    begun, steps = thread_time(), 0
    while thread_time() - begun < seconds:
        for part in parts:
            convert(part)
            steps += sum(batch.steps for batch in part)
    return (thread_time() - begun) / steps


def with_cost(bare: Turn, cpu_s: float) -> Turn:
    """Return the rates of a fleet whose learner spends so much more on each step, and waits meanwhile."""
    return Turn(1 / (1 / bare.rate + cpu_s), 1 / (1 / bare.per_cpu_s + cpu_s))
