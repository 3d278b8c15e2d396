"""TorchRL's collectors.

python tests/bench/peers/torchrl_rates.py (sampling | workers) NUM_ENVS SECONDS

- sampling: a `Collector` of a `SerialEnv` in this process.
- workers: a `MultiAsyncCollector` of two such envs in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from measuring import Take, main
from small_policy import ENV
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator

STEPS = 64
"""Steps of each env in one batch."""


def make_env(width: int) -> SerialEnv:
    """Return so many envs in one process."""
    return SerialEnv(width, partial(GymEnv, ENV))


def make_policy() -> Any:
    """Return a shared trunk, an actor with log-probs, and a value."""
    trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return TensorDictSequential(
        TensorDictModule(trunk, in_keys=["observation"], out_keys=["features"]),
        ProbabilisticActor(
            TensorDictModule(nn.Linear(64, 2), in_keys=["features"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        ),
        ValueOperator(nn.Linear(64, 1), in_keys=["features"]),
    )


@contextmanager
def sampling(case: str) -> Iterator[Take]:
    """Collect in this process."""
    frames = STEPS * int(case)
    with _counted(Collector(make_env(int(case)), make_policy(), frames_per_batch=frames, total_frames=-1)) as take:
        yield take


@contextmanager
def workers(case: str) -> Iterator[Take]:
    """Collect in two processes."""
    make, frames = partial(make_env, int(case)), STEPS * int(case)
    collector = MultiAsyncCollector([make, make], make_policy(), frames_per_batch=frames, total_frames=-1)
    with _counted(collector) as take:
        yield take


@contextmanager
def _counted(collector: Any) -> Iterator[Take]:
    torch.set_num_threads(1)
    batches = iter(collector)
    yield lambda: int(next(batches).numel())
    collector.shutdown()


if __name__ == "__main__":
    main(sampling=sampling, workers=workers)
