"""Batches made by hand, and the smallest world there is: see a context, guess it, episode over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.learner_stub.rollouts.module import TrainableModule, build_module
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, EXPLORE, ChunkEnd
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.settings.config import ModuleSection

CONTEXTS = 3
SPACES = Spaces(observation=Box(shape=(CONTEXTS,), dtype="<f4"), action=Discrete(n=CONTEXTS))

MakeBatch = Callable[..., ChunkBatch]


def _make_batch(
    lengths: Sequence[int],
    ends: Sequence[ChunkEnd],
    *,
    seed: int = 0,
    flags: int = EXPLORE,
    learner_epoch: int = 1,
    weights_seq: int = 1,
) -> ChunkBatch:
    random = np.random.default_rng(seed)
    table = np.zeros(len(lengths), CHUNK_TABLE)
    table["length"], table["end"], table["flags"], table["episode_length"] = lengths, ends, flags, lengths
    table["episode_return"] = np.arange(len(lengths))
    steps = sum(lengths)
    rows = steps + sum(length > 0 for length in lengths)
    columns = {
        "obs": random.normal(size=(rows, CONTEXTS)).astype(np.float32),
        "actions": random.integers(CONTEXTS, size=steps),
        "rewards": random.normal(size=steps),
        "weights_seq": np.full(steps, weights_seq),
        "logp": np.full(steps, -np.log(CONTEXTS), np.float32),
    }
    return ChunkBatch(table, columns, SPACES.observation, SPACES.action, learner_epoch=learner_epoch)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """As learners run; several threads on tiny tensors are many times slower, and differ in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_batch() -> MakeBatch:
    """`make_batch(lengths, ends, ...)`: a batch of random numbers, sampled by a uniform policy."""
    return _make_batch


@pytest.fixture
def spaces() -> Spaces:
    """The spaces of the guessing world and of `make_batch`."""
    return SPACES


@pytest.fixture
def new_module() -> Callable[[], TrainableModule]:
    """Builds the default module of workers, small; the same each time."""
    return lambda: build_module(ModuleSection(config={"hidden": (16,)}), SPACES)


@dataclass
class Guessing:
    """Episodes of one step: reward 1 for the action that equals the context."""

    random: np.random.Generator

    def batch(self, module: TrainableModule, episodes: int) -> ChunkBatch:
        context = self.random.integers(CONTEXTS, size=episodes)
        obs = np.eye(CONTEXTS, dtype=np.float32)[np.repeat(context, 2)]
        with torch.no_grad():
            logits = module.forward_train({"obs": torch.from_numpy(obs[::2].copy())})["action_dist_inputs"]
            share = torch.softmax(logits, -1).cumsum(-1).numpy()
            actions = (self.random.random((episodes, 1)) > share[:, :-1]).sum(-1)
            logp = module.logp(logits, torch.from_numpy(actions)).numpy()
        batch = _make_batch([1] * episodes, [ChunkEnd.TERMINATED] * episodes)
        rewards = (actions == context).astype(np.float64)
        batch.table["episode_return"] = rewards
        batch.arrays.update(obs=obs, actions=actions, rewards=rewards, logp=logp)
        return batch


@pytest.fixture
def guessing() -> Guessing:
    return Guessing(np.random.default_rng(0))
