"""Transitions and time-major arrays against plain loops over chunks; tensors without a warning."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.learner_stub import to_torch
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, Spaces
from headrace.schemas.chunks.spaces import Tuple as TupleSpace
from headrace.schemas.errors import ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.spaces import convert
from support.decode_batch import decode_batch
from support.pipeline.delivery import SPACES, Envs

BATCHES = st.builds(
    lambda seed, width, length, ends, fails: Envs(seed, width, ends=ends, fails=fails).fragments(3, length)[-1],
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    length=st.integers(1, 9),
    ends=st.sampled_from([0.0, 0.2, 0.7]),
    fails=st.sampled_from([0.0, 0.2]),
)
"""Fragments with chunks that are cut, terminated, truncated, and with end markers of aborted episodes."""


@settings(max_examples=60)
@given(BATCHES)
def test_transitions_are_the_steps_of_the_chunks_in_order(batch: ChunkBatch) -> None:
    given_ = batch.transitions()
    rows = [(i, chunk, t) for i, chunk in enumerate(batch) for t in range(len(chunk))]
    assert len(given_) == batch.steps == len(rows)
    for n, (i, chunk, t) in enumerate(rows):
        last = t == len(chunk) - 1
        assert given_.chunk[n] == i
        assert (given_.obs[n] == chunk.obs[t]).all()
        assert (given_.next_obs[n] == chunk.obs[t + 1]).all()
        assert given_.actions[n] == chunk.actions[t]
        assert given_.rewards[n] == chunk.rewards[t]
        assert given_.columns["weights_seq"][n] == chunk.weights_seq[t]
        assert given_.last[n] == last
        assert given_.terminated[n] == (last and chunk.is_terminated)
        assert given_.truncated[n] == (last and chunk.is_truncated)


@settings(max_examples=60)
@given(BATCHES)
def test_time_major_has_each_chunk_in_a_lane_of_its_own(batch: ChunkBatch) -> None:
    given_ = batch.time_major()
    chunks = [(i, chunk) for i, chunk in enumerate(batch) if len(chunk)]
    longest = max((len(chunk) for _, chunk in chunks), default=0)
    assert given_.rewards.shape == given_.mask.shape == (longest, len(chunks))
    assert given_.obs.shape == (longest + 1, len(chunks), 1)
    assert given_.mask.sum() == batch.steps
    for lane, (i, chunk) in enumerate(chunks):
        own = len(chunk)
        assert (given_.chunk[lane], given_.lengths[lane]) == (i, own)
        assert (given_.terminated[lane], given_.truncated[lane]) == (chunk.is_terminated, chunk.is_truncated)
        assert given_.mask[:, lane].tolist() == [True] * own + [False] * (longest - own)
        np.testing.assert_array_equal(given_.obs[: own + 1, lane], chunk.obs)
        np.testing.assert_array_equal(given_.actions[:own, lane], chunk.actions)
        np.testing.assert_array_equal(given_.columns["weights_seq"][:own, lane], chunk.weights_seq)
        assert not given_.obs[own + 1 :, lane].any()
        assert not given_.rewards[own:, lane].any()


def test_a_received_batch_gives_writable_arrays_and_tensors_without_a_warning() -> None:
    sent = Envs(3).fragment()
    header = BatchHeader(
        fleet_id="f",
        slot=0,
        incarnation=1,
        seq=1,
        steps=sent.steps,
        chunks=len(sent),
        reasons=list(sent.reasons),
        totals=WorkerTotals(),
    )
    frames = [bytes(frame) for frame in encode_batch(sent, header)]
    _, batch = decode_batch(frames, SPACES.observation, SPACES.action)
    assert not batch.columns["rewards"].flags.writeable
    views: list[Any] = [batch.transitions(), batch.time_major()]
    for view in views:
        for array in (view.obs, view.actions, view.rewards, *view.columns.values()):
            assert array.flags.writeable
        tensors = to_torch(view)
        tensors.rewards.add_(1.0)
        assert tensors.rewards.sum() == view.rewards.sum(), "no copy of a copy"
        assert torch.equal(tensors.obs, torch.from_numpy(view.obs))
        assert repr(view).startswith(f"<{type(view).__name__}: obs {view.obs.shape}, actions {view.actions.shape}, ")
        assert repr(tensors) == repr(view)
    columns = to_torch(batch)
    columns["rewards"] += 1.0
    np.testing.assert_array_equal(columns["rewards"].numpy(), batch.columns["rewards"] + 1.0)
    with pytest.raises(TypeError, match="str has no arrays"):
        to_torch("a batch")


def test_chunks_of_one_env_stand_in_time_order() -> None:
    """The promise that a per-env recursion over a batch, and over the batches of a worker, rests on."""
    before: dict[int, EpisodeChunk] = {}
    with SingleAgentEnvRunner(EnvRunnerConfig(env="CartPole-v1", num_envs=3, seed=0)) as runner:
        for _ in range(4):
            for chunk in runner.sample_fragment(random_actions=True):
                last = before.get(chunk.env_index)
                if last is not None and not last.is_done:
                    assert (chunk.episode_id, chunk.chunk_index) == (last.episode_id, last.chunk_index + 1)
                    assert chunk.t_start == last.t_start + len(last)
                else:
                    assert (chunk.chunk_index, chunk.t_start) == (0, 0)
                before[chunk.env_index] = chunk
    assert set(before) == {0, 1, 2}


# -- spaces -----------------------------------------------------------------------------------------------------------


def test_spaces_convert_to_gymnasium_spaces_and_back() -> None:
    spaces = Spaces(
        observation=Dict(spaces={"arm": Box(shape=(3,), dtype="<f4", low=-1.0, high=1.0), "on": Discrete(n=2)}),
        action=TupleSpace(spaces=(Discrete(n=4, start=1), Box(shape=(2,), dtype="<f8"))),
    )
    observation, action = spaces.to_gymnasium()
    assert (convert(observation, "obs"), convert(action, "action")) == (spaces.observation, spaces.action)
    assert action.contains(action.sample())


def test_a_model_fits_a_fleet_however_gymnasium_writes_its_spaces() -> None:
    spaces = Spaces(observation=Dict(spaces={"on": MultiBinary(shape=(3,))}), action=MultiBinary(shape=(3,)))
    for form in (3, (3,), [3]):
        own = gym.spaces.MultiBinary(form)
        spaces.check_gymnasium(gym.spaces.Dict({"on": own}), own, "this model")
    with pytest.raises(ModuleError, match=r"this model has the action space MultiBinary\(4\)"):
        spaces.check_gymnasium(gym.spaces.Dict({"on": own}), gym.spaces.MultiBinary(4), "this model")


def test_the_bounds_of_a_model_may_differ_for_observations_of_floats_alone() -> None:
    box = Box(shape=(2,), dtype="<f4", low=-1.0, high=1.0)
    spaces = Spaces(observation=TupleSpace(spaces=(box,)), action=box)
    one, two = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Box(-2.0, 2.0, (2,))
    spaces.check_gymnasium(gym.spaces.Tuple([two]), one, "this model")
    with pytest.raises(ModuleError, match="this model has the action space"):
        spaces.check_gymnasium(gym.spaces.Tuple([two]), two, "this model")
