"""A client that names the session of another one."""

from __future__ import annotations

from typing import Any

from headrace.schemas.peers import port_watch
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientHeartbeat, ClientHello
from support.raw_zmtp import RawZmtp, on_the_wire
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import wait_until

OWN: dict[str, Any] = {"session": "own", "token": "own"}


def test_a_stranger_that_names_the_session_of_another_client_is_none_of_it() -> None:
    """It is cut after 64 messages, as one without a session."""
    with (
        Served() as server,
        PolicyClient(server.endpoint) as client,
        RawZmtp(server.endpoint) as owner,
        RawZmtp(server.endpoint) as stranger,
    ):
        owner.send(on_the_wire(ClientHello(**OWN).frames()))
        wait_until(lambda: server.counts()["sessions"] == 2, "the session")
        stranger.send(
            on_the_wire(ClientHeartbeat(session="own", token="a guess").frames()) * port_watch.STRANGE_MESSAGES
        )
        wait_until(stranger.is_cut, "the stranger to be cut")
        assert not owner.is_cut()
        episode = client.start_episode()
        assert client.get_action(episode, [1, 1]) == rule([1, 1])
        client.end_episode(episode, [9, 1])
