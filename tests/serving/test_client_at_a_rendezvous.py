"""Clients that know only the rendezvous of their fleet: they find a worker that serves, and follow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.errors import ConfigError, UnreachableError
from headrace.schemas.errors.episodes import EpisodeAbortedError
from headrace.schemas.peers.rendezvous import RENDEZVOUS_VARIABLE, Port, Published
from headrace.workers.serving.client import PolicyClient
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import TIMEOUT_S


def publish(meet: Path, **addresses: str) -> None:
    ports = {name.replace("_", "-"): Port(address=address) for name, address in addresses.items()}
    Published(fleet_id="demo", endpoints={}, ports=ports).write(meet)


def play(client: PolicyClient) -> str:
    episode = client.start_episode()
    assert client.get_action(episode, [1, 1]) == rule([1, 1])
    client.end_episode(episode, [2, 1])
    return episode


def test_a_client_follows_its_worker_to_a_new_port_and_then_changes_worker(tmp_path: Path) -> None:
    meet = tmp_path / "meet.json"
    with Served() as other:
        with Served() as second:
            with Served() as first:
                publish(meet, clients_0=first.endpoint)
                client = PolicyClient.of(meet, timeout_s=TIMEOUT_S)
                episode = client.start_episode()
                client.get_action(episode, [1, 1])
                publish(meet, clients_0=second.endpoint, clients_1=other.endpoint)
                client.get_action(episode, [2, 1])
                assert first.episodes.episodes[episode].actions == [rule([1, 1]), rule([2, 1])], "it still answers"
            with pytest.raises(EpisodeAbortedError):
                client.get_action(episode, [3, 1])
            assert play(client) in second.episodes.episodes
            publish(meet, clients_1=other.endpoint)
        assert play(client) in other.episodes.episodes
        client.close()


def test_the_environment_names_the_rendezvous_and_the_slot_picks_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = tmp_path / "meet.json"
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, str(meet))
    with Served() as zero, Served() as one:
        publish(meet, clients_0=zero.endpoint, clients_1=one.endpoint, envs_1="tcp://a:1")
        with PolicyClient.of(slot=1) as client:
            assert play(client) in one.episodes.episodes
    with pytest.raises(UnreachableError, match="names no worker of slot 2 that serves clients"):
        PolicyClient.of(slot=2, connect_timeout_s=0.3)


def test_a_place_that_is_no_rendezvous_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RENDEZVOUS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"give a file or URL, or set {RENDEZVOUS_VARIABLE}"):
        PolicyClient.of()
    with pytest.raises(ConfigError, match="give a file or URL"):
        PolicyClient.of("dns://head")
