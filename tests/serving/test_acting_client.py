"""An acting client cuts the same chunks as the worker; each is taken once, and no episode stays open."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import DecodeError, KeysRefusedError
from headrace.schemas.errors.episodes import EpisodeAbortedError, EpisodesClosedError
from headrace.schemas.errors.serving import ServingError
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.served_env import ServedEnvs
from headrace.workers.serving.serving_messages import ClientPull
from support.refusals import refused
from support.serving.acting_clients import PAIR, Shipper, acting, assert_alike, play, play_pair, serving_runner
from support.waiting import TIMEOUT_S, wait_until


def by_part(chunks: list[EpisodeChunk]) -> list[list[EpisodeChunk]]:
    """Each agent's of each episode, episodes in the order in which they began."""
    begun: dict[str, int] = {}
    found: dict[tuple[int, str], list[EpisodeChunk]] = {}
    for chunk in chunks:
        number = begun.setdefault(chunk.episode_id, len(begun))
        found.setdefault((number, chunk.agent_id), []).append(chunk)
    return [found[part] for part in sorted(found)]


@pytest.mark.parametrize(
    ("settings", "play", "parts"), [({}, play, 3), (PAIR, play_pair, 6)], ids=["one agent", "several agents"]
)
def test_acting_and_served_clients_give_bit_identical_chunks(settings: dict[str, Any], play: Any, parts: int) -> None:
    with serving_runner(**settings) as there, PolicyClient(there.endpoint, timeout_s=TIMEOUT_S) as client:
        play(client, 45)
    with serving_runner(**settings) as here, acting(here.endpoint, **settings) as client:
        play(client, 45)
    served, acted = by_part(there.chunks), by_part(here.chunks)
    assert len(served) == len(acted) == parts
    assert max(map(len, served)) > 1, "some episode is cut"
    for ours, theirs in zip(acted, served, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_alike(a, b)
    for name in ("stepped", "env_steps", "env_steps_delivered", "episodes", "discarded"):
        assert getattr(here.runner.totals, name) == getattr(there.runner.totals, name), name
    report, other = here.runner.get_metrics(), there.runner.get_metrics()
    for name in ("num_episodes_lifetime", "episode_return_mean", "episode_len_mean", "agent_episode_returns_mean"):
        assert report[name] == other[name], name


def test_an_acting_client_with_keys_acts_over_tcp_and_one_without_is_refused(tmp_path: Path) -> None:
    make_keys(keys := tmp_path / "keys")
    with serving_runner(keys_dir=str(keys)) as there:
        assert there.endpoint.startswith("tcp://")
        with acting(there.endpoint, keys=str(keys)) as client:
            play(client, 20, 1)
        with pytest.raises(KeysRefusedError, match="refuses peers without keys"):
            acting(there.endpoint)
    assert client.failure is None
    assert there.chunks


def test_an_acting_client_loads_newer_weights_and_its_chunks_name_them() -> None:
    with serving_runner(external_fragment_max_age_s=0.1) as there:
        with acting(there.endpoint, external_fragment_max_age_s=0.1) as one, acting(there.endpoint, seed=4) as two:
            play(one, 20, 1)
            there.publish(2)
            played = threading.Thread(target=play, args=(two, 10, 2))
            played.start()
            ours = one._acting._runner
            wait_until(lambda: (play(one, 5, 1), ours.weights_version)[1] == (1, 2), what="the newer weights")
            play(one, 12, 1)
            played.join(100)
        versions = {seq for chunk in there.chunks for seq in chunk.weights_seq.tolist()}
        assert versions == {1, 2}
    assert there.runner.get_metrics()["num_episodes_lifetime"] >= 5


def test_a_lost_client_leaves_a_marker_and_gets_an_aborted_error_on_return() -> None:
    quick = {"external_fragment_max_age_s": 0.1}
    with serving_runner(lease_s=1.0, **quick) as there, acting(there.endpoint, **quick) as client:
        episode = client.start_episode()
        for _ in range(3):
            client.get_action(episode, np.zeros(4))
        wait_until(lambda: there.chunks, what="a first chunk")
        sessions: list[Any] = []
        dispatcher: Any = there.runner.env.dispatcher  # type: ignore[union-attr]
        dispatcher.post(lambda s, now: (s._close(client._acting._link.session, "client_lost"), sessions.append(s)))
        wait_until(lambda: any(c.end is ChunkEnd.ABORTED for c in there.chunks), what="the marker")
        assert there.chunks[-1].end_reason == "client_lost"
        with pytest.raises(EpisodeAbortedError):
            wait_until(lambda: client.get_action(episode, np.zeros(4)) is None, what="the end of the episode")
        play(client, 5, 1)


def test_a_dropped_acting_client_ships_its_steps_and_ends_with_its_threads() -> None:
    others = set(threading.enumerate())
    with serving_runner() as there:
        here = {thread.name for thread in threading.enumerate()}
        client = acting(there.endpoint)
        play(client, 20, 1)
        client.get_action(client.start_episode(), np.zeros(4))
        totals = client._acting._runner.totals
        with pytest.warns(ResourceWarning, match=r"the acting client client-\w+ was dropped without close"):
            del client
        wait_until(lambda: {thread.name for thread in threading.enumerate()} <= here, "the end of its threads")
        assert there.chunks
        assert sum(map(len, there.chunks)) + sum(totals.discarded.values()) == totals.stepped > 0
    assert set(threading.enumerate()) <= others


def test_a_restarted_server_gets_chunks_of_new_episodes_only(socket_dir: str) -> None:
    quick = {"external_fragment_max_age_s": 0.1}
    with serving_runner(socket_dir=socket_dir, **quick) as before:
        client = acting(before.endpoint, **quick)
        play(client, 20, 2)
        episode = client.start_episode()
        client.get_action(episode, np.zeros(4))
    with serving_runner(socket_dir=socket_dir, **quick) as after, client:
        after.publish(2)
        with pytest.raises(EpisodeAbortedError):
            wait_until(lambda: client.get_action(episode, np.zeros(4)) is None, what="the end of the episode")
        play(client, 20, 2)
    assert client.failure is None
    assert after.chunks
    assert not {chunk.episode_id for chunk in before.chunks} & {chunk.episode_id for chunk in after.chunks}


def test_a_repeated_shipment_is_taken_once_and_a_bad_one_changes_nothing() -> None:
    with serving_runner(episode_lookback_horizon=0) as there, PolicyClient(there.endpoint, timeout_s=10) as link:
        shipper = Shipper(there, link)
        first, second = shipper.batch(), shipper.batch()
        shipper.ship(first, 1, {"training_disabled": 5})
        taken = len(there.chunks)
        shipper.ship(first, 1, {"training_disabled": 5})
        assert len(there.chunks) == taken == len(first)
        assert there.runner.totals.discarded == {"training_disabled": 5}
        with refused("step_order", match="not the next one, which is 2"):
            shipper.ship(second, 4)
        with refused("bad_request", match="an unknown reason"):
            shipper.ship(second, 2, {"laziness": 1})
        with pytest.raises((ServingError, DecodeError)):
            shipper.ship(second, 2, spoil=400)
        seqs = second.columns["weights_seq"]
        for strange, code in ((9, "not_yet"), (0, "bad_request")):
            seqs[:] = strange
            with refused(code, match="chunks by the weights"):
                shipper.ship(second, 2)
        seqs[:] = 1
        shipper.ship(second, 2)
        assert len(there.chunks) == taken + len(second)
        shipper.close()


def test_a_server_without_client_inference_refuses_acting_clients() -> None:
    settings = ServingSection(enabled=True)
    with SingleAgentEnvRunner(EnvRunnerConfig(env=ServedEnvs(settings, "CartPole-v1", ""), num_envs=2)) as runner:
        env: Any = runner.env
        with acting(env.endpoint) as client:
            with pytest.raises(EpisodesClosedError, match="client_inference = true"):
                client.get_action(client.start_episode(), np.zeros(4))
            assert isinstance(client.failure, ServingError)
            assert client.failure.code == "bad_request"
        with PolicyClient(env.endpoint) as link, refused("bad_request", match="client_inference"):
            link.ask(ClientPull)
