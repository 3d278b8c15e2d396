"""Metrics, state, spaces, and the runner's beginning and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.runner.env_runner import EnvRunner
from support.envs.toy import Counting, runner
from support.runners.comparing import changed, equal_states
from support.runners.kinds import KINDS, SINGLE, Kind


def test_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EnvRunner()  # type: ignore[abstract]


def test_get_metrics_covers_the_episodes_completed_since_the_last_call() -> None:
    with runner(env_config={"length": 4}) as sampler:
        assert not any(value for name, value in sampler.get_metrics().items() if name != "time_s_lifetime")
        assert not any(name.startswith("episode_") for name in sampler.get_metrics())
        sampler.sample(num_timesteps=6)
        first = sampler.get_metrics()
        sampler.sample(num_timesteps=6)
        second = sampler.get_metrics()
    assert (first["num_env_steps_sampled"], first["num_episodes"]) == (6, 1)
    assert (second["num_env_steps_sampled"], second["num_env_steps_sampled_lifetime"]) == (6, 12)
    assert (second["num_episodes"], second["num_episodes_lifetime"]) == (2, 3)
    assert second["episode_len_mean"] == second["episode_len_min"] == second["episode_len_max"] == 4
    assert second["episode_return_mean"] == second["episode_return_min"] == second["episode_return_max"] == 10
    assert second["episode_duration_sec_mean"] > 0


def test_finished_episodes_are_handed_out_once() -> None:
    with runner(env_config={"length": 4}) as sampler:
        sampler.sample(num_timesteps=9)
        assert sampler.take_finished_episodes() == [(10.0, 4), (10.0, 4)]
        assert sampler.take_finished_episodes() == []


def test_get_spaces_gives_spaces_by_module_id() -> None:
    with runner() as sampler:
        assert sampler.get_spaces()["default_policy"] == (Counting.observation_space, Counting.action_space)


@KINDS
def test_get_spaces_gives_the_spaces_of_the_envs_by_rllibs_names(kind: Kind) -> None:
    with kind.runner(3) as sampler:
        spaces = sampler.get_spaces()
        modules = spaces.keys() - {"__env__", "__env_single__"}
        assert modules == set(sampler.modules)
        seen, done = spaces["__env_single__"]
        (module,) = modules
        of_one = (seen, done) if kind is SINGLE else (seen["a0"], done["a0"])
        assert of_one == spaces[module]
        assert spaces["__env__"] == (batch_space(seen, 3), batch_space(done, 3))


@KINDS
def test_end_markers_come_only_if_asked(kind: Kind) -> None:
    with kind.runner(1, length=9) as sampler:
        chunks = list(sampler.sample(num_timesteps=4))
        for wanted in (False, True, False):
            given = sampler.sample(num_timesteps=3, force_reset=True, end_markers=wanted)
            markers = [chunk for chunk in given if chunk.end is ChunkEnd.ABORTED]
            assert len(markers) == kind.agents * wanted
            assert [len(chunk) for chunk in markers] == [0] * len(markers)
            chunks += given
        assert sampler.totals.delivered_chunks == len(chunks) == 5 * kind.agents
        sampler.sample(num_timesteps=3)
        assert sampler.discard_open(Discard.SHUTDOWN)[-1].end is ChunkEnd.ABORTED
        kind.check_books(sampler)


def test_set_state_takes_the_weights_of_another_runner_only_if_newer() -> None:
    with runner() as sampler, runner(module_config={"seed": 1}) as other:
        sampler.sample(num_timesteps=12)
        weights = sampler.get_state()["rl_module"]
        sampler.set_weights(weights, seq=3, learner_epoch=1)
        state = sampler.get_state()
        assert state["num_env_steps_sampled_lifetime"] == 12
        other.set_state(state)
        assert other.weights_version == (1, 3)
        assert all(np.array_equal(v, weights[k]) for k, v in other.get_state()["rl_module"].items())
        assert other.get_metrics()["num_env_steps_sampled_lifetime"] == 12
        for epoch, seq in ((1, 3), (1, 2), (0, 9)):
            zeros = {k: np.zeros_like(v) for k, v in weights.items()}
            other.set_state({"rl_module": zeros, "weights_seq_no": seq, "learner_epoch": epoch})
            assert other.weights_version == (1, 3)
        assert all(np.array_equal(v, weights[k]) for k, v in other.get_state()["rl_module"].items())
        other.set_state({"rl_module": zeros, "weights_seq_no": 2, "learner_epoch": 1}, force=True)
        assert other.weights_version == (1, 2)
        other.set_state({})


def test_make_env_and_make_module_may_be_called_any_time() -> None:
    with runner(env_config={"length": 10}) as sampler:
        (begun,) = sampler.sample(num_timesteps=4)
        sampler.make_env()
        sampler.make_module()
        chunk, marker = sampler.sample(num_timesteps=4, end_markers=True)
        assert (marker.episode_id, marker.end_reason) == (begun.episode_id, "reset")
        assert (chunk.t_start, chunk.chunk_index) == (0, 0)
        assert chunk.episode_id != begun.episode_id


def _weights(sampler: Any) -> Any:
    return sampler.get_state("rl_module")["rl_module"]


@KINDS
def test_make_module_builds_a_module_from_the_current_config(kind: Kind) -> None:
    with kind.runner(1, module_config={"seed": 1}) as sampler, kind.runner(1, module_config={"seed": 2}) as other:
        sampler.config.module_config["seed"] = 2
        assert not equal_states(_weights(sampler), _weights(other))
        sampler.make_module()
        assert equal_states(_weights(sampler), _weights(other))


@KINDS
def test_make_module_drops_the_weights_given_to_the_old_module(kind: Kind) -> None:
    with kind.runner(num_envs=1) as sampler:
        built = _weights(sampler)
        sampler.set_weights(changed(built, lambda array: array + 1), seq=4, learner_epoch=2)
        assert sampler.weights_version == (2, 4)
        sampler.make_module()
        assert sampler.weights_version == (0, 0)
        assert equal_states(_weights(sampler), built)


@KINDS
def test_weights_may_be_the_state_dict_of_a_torch_module(kind: Kind) -> None:
    with kind.runner(1, module_config={"seed": 1}) as sampler, kind.runner(1, module_config={"seed": 2}) as other:
        (module,) = other.modules.values()
        sampler.set_weights(module.state_dict(), seq=1)
        assert equal_states(_weights(sampler), _weights(other))


@KINDS
@pytest.mark.parametrize("learner_epoch", [1, 2])
def test_weights_that_do_not_fit_leave_the_old_version_acting_with_its_label(kind: Kind, learner_epoch: int) -> None:
    """The error comes at once; or, with weights of another learner, at the next cut."""
    with kind.runner(num_envs=1, rollout_fragment_length=4) as sampler:
        old = changed(_weights(sampler), lambda array: array + 1)
        sampler.set_weights(old, seq=4, learner_epoch=1, digest="old")
        strange = changed(old, lambda array: np.zeros((*array.shape, 2), np.float32))

        def apply_strange() -> None:
            sampler.set_weights(strange, seq=5, learner_epoch=learner_epoch, digest="strange")

        with pytest.raises(ModuleError, match="learner the same module"):
            sampler.sample_fragment(on_poll=apply_strange)
        assert sampler.weights_version == (1, 4)
        assert equal_states(_weights(sampler), old)
        chunks = list(sampler.sample_fragment())
        assert {(chunk.learner_epoch, chunk.weights_digest) for chunk in chunks} == {(1, "old")}
        assert {seq for chunk in chunks for seq in chunk.weights_seq.tolist()} == {4}
        kind.check_books(sampler)


@KINDS
def test_the_digest_of_a_batch_is_that_of_its_newest_step(kind: Kind) -> None:
    """Weights that come after the last step of a batch act only in the next one."""
    with kind.runner(num_envs=1, rollout_fragment_length=4) as sampler:
        weights, polls = _weights(sampler), 0

        def publish() -> None:
            nonlocal polls
            polls += 1
            sampler.set_weights(weights, seq=polls, learner_epoch=1, digest=f"d{polls}")

        sampler.set_weights(weights, seq=0, learner_epoch=1, digest="d0")
        for newest in (3, 7):
            chunks = list(sampler.sample_fragment(on_poll=publish))
            assert max(seq for chunk in chunks for seq in chunk.weights_seq.tolist()) == newest
            assert {chunk.weights_digest for chunk in chunks} == {f"d{newest}"}


def test_stop_closes_the_envs_and_a_stopped_runner_is_not_healthy() -> None:
    sampler = runner(num_envs=2)
    sampler.assert_healthy()
    envs = [lane.env for lane in sampler._sampler.envs.lanes]
    sampler.stop()
    assert [env.closed for env in envs] == [1, 1]  # type: ignore[union-attr]
    sampler.stop()
    with pytest.raises(AssertionError):
        sampler.assert_healthy()
    with pytest.raises(AssertionError):
        SingleAgentEnvRunner.__new__(SingleAgentEnvRunner).assert_healthy()
    SingleAgentEnvRunner(EnvRunnerConfig()).stop()
