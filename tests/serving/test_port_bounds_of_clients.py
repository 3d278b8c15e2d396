"""Peers that send garbage to the ZeroMQ ports of a worker, for clients and for env hosts: honest peers go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.serving.client import PolicyClient
from support.fleets.env_hosts import EnvHosts
from support.ports import free_port
from support.raw_zmtp import RawZmtp, frame, head
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import wait_until

GoOn = Callable[[], None]


@contextmanager
def clients_port(folder: Path) -> Iterator[tuple[str, GoOn]]:
    """A policy server, and a client that plays an episode there."""
    with Served(host="127.0.0.1") as server, PolicyClient(server.endpoint) as client:

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
            env="CartPole-v1", num_envs=2, env_placement="remote", rollout_fragment_length=8, **hosts.at
        )
        with SingleAgentEnvRunner(config, run_uid="test") as sampler:

            def sample() -> None:
                assert sum(len(chunk) for chunk in sampler.sample_fragment()) == 16

            yield hosts.endpoint(), sample


@pytest.mark.one_in(2)
@pytest.mark.processes
@pytest.mark.parametrize("port", [clients_port, env_hosts_port])
def test_a_frame_too_large_ends_its_connection_and_the_honest_peer_goes_on(
    tmp_path: Path, port: Callable[[Path], Iterator[tuple[str, GoOn]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with port(tmp_path) as (endpoint, go_on), ExitStack() as stack:  # type: ignore[attr-defined]
        chatty, huge, *silent = (stack.enter_context(RawZmtp(endpoint)) for _ in range(5))
        go_on()
        huge.send(head(1 << 40, more=False))
        chatty.send(frame(b"\x1b[31mgarbage", more=False) * 64)
        wait_until(lambda: (go_on(), huge.is_cut())[1], "the end of its connection")
        go_on()
        assert not any(stranger.is_cut() for stranger in silent)
        garbage = [record for record in caplog.records if "garbage" in record.getMessage()]
        assert len(garbage) <= 1
