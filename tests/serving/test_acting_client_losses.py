"""Chunks that an acting client cannot ship as they are: refused by name, split, or reported as lost."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import DecodeError
from headrace.schemas.errors.episodes import EpisodeAbortedError, EpisodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.connectors import ClipActions, FrameStack, UnsquashActions
from headrace.workers.serving.acting.shipments import Shipments
from headrace.workers.serving.client import PolicyClient
from support.refusals import refused
from support.serving.acting_clients import ServingRunner, Shipper, acting, external, serving_runner
from support.waiting import wait_until

LSTM = "headrace.workers.modules:lstm_actor_critic"
SEEN = np.zeros(4, np.float32)


def walk(client: Any, steps: int, *, info: dict[str, Any] | None = None, training_enabled: bool = True) -> None:
    """An episode of so many steps; `info` comes with each."""
    episode = client.start_episode(training_enabled=training_enabled)
    for _ in range(steps):
        client.get_action(episode, SEEN)
        client.log_returns(episode, 2.0, info)
    client.end_episode(episode, SEEN)


@pytest.mark.parametrize(
    "settings",
    [
        {"env": "CartPole-v1"},
        {"env": "CartPole-v1", "module": LSTM, "env_to_module": [FrameStack]},
        {"env": "CartPole-v1", "explore": False, "episode_lookback_horizon": 3},
        {"env": "Pendulum-v1"},
        {"env": "Pendulum-v1", "module": LSTM, "module_to_env": [UnsquashActions, ClipActions]},
    ],
)
def test_policy_columns_accept_the_runners_batch_and_name_an_absent_column(settings: dict[str, Any]) -> None:
    with SingleAgentEnvRunner(EnvRunnerConfig(num_envs=2, seed=0, rollout_fragment_length=8, **settings)) as runner:
        columns = runner.policy_columns()["default_policy"]
        batch = external(runner.sample_fragment())
        columns.check(batch)
        for name in columns.kinds:
            with pytest.raises(DecodeError, match=f"column '{name}' is absent"):
                columns.check(replace(batch, arrays={n: c for n, c in batch.arrays.items() if n != name}))


def test_chunks_with_wrong_columns_are_refused_by_name_and_not_taken() -> None:
    with serving_runner(episode_lookback_horizon=0) as there, PolicyClient(there.endpoint, timeout_s=10) as link:
        shipper = Shipper(there, link)
        batch = shipper.batch()
        right = batch.columns["logp"]
        for wrong, words in (
            (right.astype(np.float64), "column 'logp' is float64 of .*, and float32 of"),
            (np.zeros((batch.steps, 2), np.float32), r"column 'logp' is float32 of \(2,\)"),
        ):
            batch.arrays["logp"] = wrong
            with refused("bad_request", match=words):
                shipper.ship(batch, 1)
        batch.arrays["logp"] = right
        batch.arrays["mood"] = right
        with refused("bad_request", match=r"column 'mood' is float32 of .*, and absent in chunks of this"):
            shipper.ship(batch, 1)
        assert not there.chunks
        del batch.arrays["mood"]
        shipper.ship(batch, 1)
        assert len(there.chunks) == len(batch)
        shipper.close()


def test_a_client_with_other_settings_gets_an_error_that_names_the_setting() -> None:
    with serving_runner() as there, acting(there.endpoint, episode_lookback_horizon=0) as client:
        with suppress(EpisodeError):
            walk(client, 40)
        wait_until(lambda: client.failure is not None, what="the refusal")
        assert "episode_lookback_horizon" in str(client.failure)


def test_a_chunk_larger_than_a_message_is_shipped_as_several_chunks() -> None:
    settings = {"rollout_fragment_length": 500, "external_fragment_max_age_s": 100.0}
    with serving_runner(max_message_bytes=1 << 14, **settings) as there:
        with acting(there.endpoint, **settings) as client:
            for _ in range(3):
                walk(client, 300)
        assert client.failure is None
        assert sum(map(len, there.chunks)) == 900
        assert max(map(len, there.chunks)) < 200
    assert [chunk.end for chunk in there.chunks].count(ChunkEnd.TERMINATED) == 3


def test_chunks_too_large_together_for_one_message_arrive_whole() -> None:
    with serving_runner(max_message_bytes=1 << 14) as there:
        with acting(there.endpoint, rollout_fragment_length=100) as client:
            for _ in range(6):
                walk(client, 8, info={"words": "x" * 500})
        assert client.failure is None
        assert [len(chunk) for chunk in there.chunks] == [8] * 6
        assert there.chunks[0].infos[1] == {"words": "x" * 500}


@pytest.mark.parametrize("most", [1 << 25, 1 << 14])
def test_infos_larger_than_a_message_go_without_their_largest_values(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    size = min(most, DEFAULT_LIMITS.infos_bytes) // 4
    with serving_runner(max_message_bytes=most) as there:
        with acting(there.endpoint, rollout_fragment_length=100) as client:
            walk(client, 8, info={"words": "x" * size, "t": 1})
        assert client.failure is None
        assert there.runner.totals.discarded == {}
        (chunk,) = there.chunks
    assert (len(chunk), [info.get("t") for info in chunk.infos]) == (8, [None, *[1] * 8])
    assert 1 <= sum("words" in info for info in chunk.infos) <= 4
    assert "infos go without info['words']" in caplog.text


def test_a_chunk_too_large_for_a_message_is_reported_as_lost_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"external_fragment_max_age_s": 0.1}
    with serving_runner(max_message_bytes=1 << 14, **quick) as there:
        with acting(there.endpoint, **quick) as client:
            walk(client, 5)
            wait_until(lambda: sum(map(len, there.chunks)) == 5, what="what fits")
            episode = client.start_episode()
            client.get_action(episode, SEEN)
            monkeypatch.setattr(Shipments, "room", 0)
            with pytest.raises(EpisodeAbortedError, match="max_message_bytes = 16384: raise that, or lower"):
                wait_until(lambda: client.get_action(episode, SEEN) is None, what="the end of the episode")
            monkeypatch.undo()
            lost = client._acting._runner.totals.stepped - 5
            walk(client, 5)
        assert client.failure is None
        assert sum(map(len, there.chunks)) == 10
        assert there.runner.totals.discarded == {"unshipped": lost}
    assert "steps of this client are lost so far, and reported" in caplog.text


def test_the_worker_counts_untrained_episodes_of_an_acting_client() -> None:
    with serving_runner() as there:
        with acting(there.endpoint) as client:
            for steps in range(1, 21):  # more than one shipment tells
                walk(client, steps, training_enabled=False)
            walk(client, 3)
        report = there.runner.get_metrics()
    assert report["num_untrained_episodes_lifetime"] == 20
    assert report["untrained_episode_len_mean"] == pytest.approx(10.5)
    assert report["untrained_episode_return_mean"] == pytest.approx(21.0)
    assert report["num_episodes_lifetime"] == 1
    assert there.runner.totals.discarded == {"training_disabled": 210}


def test_steps_that_a_stopped_server_did_not_take_are_reported_to_the_next(socket_dir: str) -> None:
    quick = {"external_fragment_max_age_s": 0.1}
    before = ServingRunner(socket_dir=socket_dir, **quick)
    client = acting(before.endpoint, **quick)
    walk(client, 5)
    wait_until(lambda: client._acting._shipments._number == 1, what="what is taken")
    taken = sum(map(len, before.chunks))
    assert before.acting_channel.end(Discard.SHUTDOWN) == []  # from now on nothing is taken there
    episode = client.start_episode()
    for _ in range(3):
        client.get_action(episode, SEEN)
    wait_until(lambda: client._acting._runner.totals.delivered > taken, what="a cut")
    before.close()
    with serving_runner(socket_dir=socket_dir, **quick) as after:
        with client, pytest.raises(EpisodeAbortedError, match="restarted"):
            wait_until(lambda: client.get_action(episode, SEEN) is None, what="the end of the episode")
        assert client.failure is None
        lost = after.runner.totals.discarded["unshipped"]
        assert lost + taken == client._acting._runner.totals.stepped
        assert lost > 0
