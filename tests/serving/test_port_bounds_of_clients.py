"""Strangers at the ZeroMQ ports of a worker, for clients and for env hosts: they are cut, and honest peers go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.peers.port_watch import STRANGE_MESSAGES, PortWatch
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.serving.client import PolicyClient
from support.fleets.env_hosts import EnvHosts
from support.ports import free_port
from support.raw_zmtp import RawZmtp, frame, head
from support.serving.plain_episodes import rule
from support.serving.served import LIMITS, Served
from support.waiting import wait_until

GoOn = Callable[[], None]


@contextmanager
def clients_port(folder: Path) -> Iterator[tuple[str, GoOn]]:
    """A policy server, and a client that plays an episode there."""
    with Served() as server, PolicyClient(server.endpoint) as client:

        def play() -> None:
            episode = client.start_episode()
            assert client.get_action(episode, [1, 1]) == rule([1, 1])
            client.end_episode(episode, [9, 1])

        yield server.endpoint, play


@contextmanager
def env_hosts_port(folder: Path) -> Iterator[tuple[str, GoOn]]:
    """A worker with two envs on a host, and a fragment of theirs."""
    with EnvHosts(folder, free_port()) as hosts:
        hosts.start("CartPole-v1", 2)
        config = EnvRunnerConfig(
            env="CartPole-v1", num_envs=2, env_placement="remote", env_hosts_port=hosts.port, rollout_fragment_length=8
        )
        with SingleAgentEnvRunner(config, run_uid="test") as sampler:

            def sample() -> None:
                assert sum(len(chunk) for chunk in sampler.sample_fragment()) == 16

            yield f"tcp://127.0.0.1:{hosts.port}", sample


@pytest.mark.one_in(2)
@pytest.mark.processes
@pytest.mark.parametrize("port", [clients_port, env_hosts_port])
def test_strangers_are_cut_and_the_honest_peer_goes_on(
    tmp_path: Path, port: Callable[[Path], Iterator[tuple[str, GoOn]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with port(tmp_path) as (endpoint, go_on), ExitStack() as stack:  # type: ignore[attr-defined]
        chatty, huge, *silent = (stack.enter_context(RawZmtp(endpoint)) for _ in range(5))
        go_on()
        huge.send(head(1 << 40, more=False))
        chatty.send(frame(b"\x1b[31mgarbage", more=False) * STRANGE_MESSAGES)
        for stranger in (chatty, huge):
            wait_until(lambda stranger=stranger: (go_on(), stranger.is_cut())[1], "the stranger to be cut")  # type: ignore[misc]
        go_on()
        assert not any(stranger.is_cut() for stranger in silent)
        garbage = [record for record in caplog.records if "garbage" in record.getMessage()]
        assert len(garbage) <= 1


def test_strangers_with_too_many_unfinished_bytes_are_cut() -> None:
    part = frame(bytes(LIMITS.max_message_bytes - 1000), more=True)
    with Served() as server, ExitStack() as stack:
        strangers = [stack.enter_context(RawZmtp(server.endpoint)) for _ in range(20)]
        for stranger in strangers:
            stranger.send(part)
        wait_until(lambda: sum(s.is_cut() for s in strangers) >= 19, "the strangers to be cut")


def test_an_error_in_the_watch_of_a_port_ends_no_bound_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No peer is known to cause one: the watch is made to fail at the first connection, at each look."""
    admit, measure, spared = PortWatch._admit, PortWatch._measure, []

    def fail_to_admit(watch: PortWatch, fd: int) -> None:
        admit(watch, fd)
        if not spared:
            spared.append(fd)
            raise RuntimeError("a mistake of ours")

    def fail_to_measure(watch: PortWatch, connection: Any, now: float, *, emptied: bool) -> None:
        if connection.fd in spared:
            raise RuntimeError("a mistake of ours")
        measure(watch, connection, now, emptied=emptied)

    monkeypatch.setattr(PortWatch, "_admit", fail_to_admit)
    monkeypatch.setattr(PortWatch, "_measure", fail_to_measure)
    with Served() as server, RawZmtp(server.endpoint):
        wait_until(lambda: bool(spared), "the watch to fail")
        with RawZmtp(server.endpoint) as huge:
            huge.send(head(1 << 40, more=False))
            wait_until(huge.is_cut, "the stranger to be cut")
    assert [record.exc_info is not None for record in caplog.records if "watch of" in record.getMessage()] == [True]
