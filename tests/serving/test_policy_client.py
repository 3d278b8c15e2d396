"""The client in Python: many threads, lost connections, a restarted server, keys."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import zmq

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, Spaces, Tuple, nest
from headrace.schemas.credentials.keys import CLIENT, CLIENT_PORT, port_keys
from headrace.schemas.errors import ConfigError, KeysRefusedError, RunDirError, UnreachableError
from headrace.schemas.errors.episodes import EpisodeAbortedError, NoFreePlaceError
from headrace.schemas.frames.wire import decode
from headrace.schemas.peers.sockets import OwnSockets
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.client.connection import Connection, ServerPlace, request_of
from headrace.workers.serving.serving_messages import ClientHeartbeat
from headrace.workers.serving.session_records import ServingLimits
from headrace.workers.serving.single_frame import split_frame
from support.fleets.env_hosts import cable_to
from support.refusals import refused
from support.serving.lost_answers import unanswered
from support.serving.plain_episodes import SPACES, rule
from support.serving.served import LIMITS, Served
from support.waiting import TIMEOUT_S, wait_until


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as served:
        yield served


def play(client: PolicyClient, steps: int = 5, **start: Any) -> str:
    """One episode; gives its id."""
    episode = client.start_episode(**start)
    for step in range(steps):
        assert client.get_action(episode, [step, 1]) == rule([step, 1])
        client.log_returns(episode, step / 2)
        client.log_returns(episode, step / 2, {"step": step})
    client.end_episode(episode, np.array([steps, 1], np.float32), truncated=True)
    return episode


def test_the_server_records_an_episode_as_the_client_played_it(server: Served) -> None:
    with PolicyClient(server.endpoint) as client:
        assert client.spaces == SPACES
        kept = server.episodes.episodes[play(client, training_enabled=False)]
    assert kept.seen == [0, 1, 2, 3, 4, 5]
    assert kept.rewards == [0, 0, 1, 2, 3, 4]
    assert kept.infos == [{"step": step} for step in range(5)]
    assert (kept.end, kept.training_enabled) == ("truncated", False)


def test_an_action_of_the_clients_own_is_logged(server: Served) -> None:
    with PolicyClient(server.endpoint) as client:
        episode = client.start_episode("mine")
        client.log_action(episode, [1, 1], 42)
        client.get_action(episode, [2, 1])
        client.end_episode(episode, [3, 1])
    assert server.episodes.episodes["mine"].actions == [42, rule([2, 1])]


@pytest.mark.parametrize("answered", [False, True])
def test_another_call_in_place_of_one_that_timed_out_is_refused(server: Served, answered: bool) -> None:
    """Earlier, it was taken for a repetition: the episode had the policy's action, and the caller did its own."""
    with PolicyClient(server.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        server.hold.set()
        with ThreadPoolExecutor(1) as pool:
            client._timeout_s = 0.5
            with pytest.raises(UnreachableError):
                client.get_action(episode, [1, 1])
            client._timeout_s = TIMEOUT_S
            if answered:
                server.hold.clear()
                wait_until(lambda: not server.episodes.waiting, what="the answer that came too late")
            with refused("step_order", match="was sent as another request; repeat that one, or abort"):
                client.log_action(episode, [1, 1], 42)
            with refused("step_order"):
                client.end_episode(episode, [1, 1])
            asked = pool.submit(client.get_action, episode, [1, 1])
            server.hold.clear()
            assert asked.result() == rule([1, 1])
        client.log_action(episode, [2, 1], 42)
        client.end_episode(episode, [3, 1])
    assert server.episodes.episodes[episode].actions == [rule([1, 1]), 42]


@pytest.mark.parametrize("taken", [False, True])
def test_rewards_logged_before_a_call_is_repeated_go_with_the_next_step(server: Served, taken: bool) -> None:
    """Earlier, they were lost where the server had taken the call without an answer."""
    with PolicyClient(server.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        client.get_action(episode, [0, 1])
        client.log_returns(episode, 1.0)
        with unanswered(taken=taken):
            client.log_action(episode, [1, 1], 42)
        client.log_returns(episode, 10.0, {"late": 1})
        for seen, action in (([2, 1], 42), ([1, 1], 7)):
            with refused("step_order", match="was sent as another request; repeat that one, or abort"):
                client.log_action(episode, seen, action)
        client.log_action(episode, [1, 1], 42)
        client.log_returns(episode, 100.0)
        with unanswered(taken=taken):
            client.end_episode(episode, [2, 1])
        with refused("busy"):
            client.log_returns(episode, 1000.0)
        client.end_episode(episode, [2, 1])
    kept = server.episodes.episodes[episode]
    assert (kept.seen, kept.actions, kept.rewards) == ([0, 1, 2], [rule([0, 1]), 42], [0, 1, 110])
    assert kept.infos == [{"late": 1}]


def test_threads_of_one_client_wait_side_by_side(server: Served) -> None:
    with PolicyClient(server.endpoint) as client:
        server.hold.set()
        threads = [threading.Thread(target=play, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server.episodes.waiting) == 8, what="eight requests at once")
        server.hold.clear()
        for thread in threads:
            thread.join(100)
        assert [episode.end for episode in server.episodes.episodes.values()] == ["truncated"] * 8


def test_broken_connections_neither_lose_nor_repeat_a_step() -> None:
    with (
        Served(host="127.0.0.1") as server,
        cable_to(int(urlsplit(server.endpoint).port or 0)) as cable,
        PolicyClient(f"tcp://127.0.0.1:{cable.port}", timeout_s=TIMEOUT_S) as client,
    ):
        stop, episodes = threading.Event(), list[str]()
        puller = threading.Thread(target=lambda: [cable.pull() for _ in iter(lambda: stop.wait(0.2), True)])
        puller.start()
        try:
            while cable.pulled < 3:
                episodes.append(play(client, 99))
        finally:
            stop.set()
            puller.join()
    for kept in (server.episodes.episodes[id] for id in episodes):
        assert kept.seen == list(range(100))
        assert kept.rewards == [0, *range(99)]


@pytest.mark.parametrize("steps", [False, True])
def test_a_restarted_server_aborts_old_episodes_and_takes_new_ones(socket_dir: str, steps: bool) -> None:
    with Served(socket_dir=socket_dir) as first:
        client = PolicyClient(first.endpoint, timeout_s=TIMEOUT_S)
        episode = client.start_episode()
        client.get_action(episode, [1, 1])
    with Served(socket_dir=socket_dir) as second:
        with pytest.raises(EpisodeAbortedError, match="open it, and start new episodes"):
            client.get_action(episode, [2, 1]) if steps else client.abort_episode(episode)
        with refused("unknown_episode"):
            client.abort_episode(episode)
        assert second.episodes.episodes[play(client)].end == "truncated"
        client.close()


@pytest.mark.parametrize("taken", [False, True])
def test_an_abort_without_an_answer_may_be_repeated(server: Served, taken: bool) -> None:
    """Earlier, the client forgot the episode at once, and its place stayed taken."""
    with PolicyClient(server.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        with unanswered(taken=taken):
            client.abort_episode(episode, "fell")
        client.abort_episode(episode, "fell")
        assert server.episodes.episodes[episode].end == "fell"
        with refused("unknown_episode"):
            client.abort_episode(episode)


def test_an_abort_after_an_end_without_an_answer_says_that_it_has_completed(server: Served) -> None:
    with PolicyClient(server.endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode()
        with unanswered(taken=True):
            client.end_episode(episode, [1, 1])
        for code in ("already_completed", "unknown_episode"):
            with refused(code):
                client.abort_episode(episode)


def test_a_client_that_vanishes_loses_its_episodes_after_its_lease() -> None:
    script = (
        "import os, sys; from headrace.workers.serving.client import PolicyClient\n"
        "client = PolicyClient(sys.argv[1]); client.get_action(client.start_episode('lost'), [1, 1])\n"
        "print(sorted(m for m in ('torch', 'gymnasium') if m in sys.modules), flush=True); os._exit(9)"
    )
    with Served(replace(LIMITS, lease_s=0.5)) as server:
        result = subprocess.run([sys.executable, "-c", script, server.endpoint], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (9, "[]\n"), result.stderr
        wait_until(lambda: server.episodes.episodes["lost"].end == "client_lost", what="the end of the lease")
        assert server.counts() == {"sessions": 0, "episodes": 0, "remembered": 0}


def test_a_simulator_may_take_longer_for_a_step_than_the_lease() -> None:
    with Served(replace(LIMITS, lease_s=0.5)) as server, PolicyClient(server.endpoint) as client:
        episode = client.start_episode()
        beyond = threading.Event()
        timer = threading.Timer(1.5, beyond.set)
        timer.start()
        assert beyond.wait(10)
        timer.join()
        client.get_action(episode, [1, 1])


def test_start_episode_waits_for_a_free_place(server: Served) -> None:
    with Served(capacity=1) as small, PolicyClient(small.endpoint) as client:
        episode = client.start_episode()
        full = pytest.raises(NoFreePlaceError, match="1 episodes are open")
        with PolicyClient(small.endpoint, timeout_s=0.3) as hasty, full:
            hasty.start_episode()
        later = threading.Timer(0.1, client.abort_episode, (episode, "enough"))
        later.start()
        client.end_episode(client.start_episode(), [0, 0])
        later.join(100)  # nobody closes a client in the midst of a call
        assert small.episodes.episodes[episode].end == "enough"


def test_a_client_that_holds_all_places_waits_for_one_of_its_own() -> None:
    """Earlier, the session's own limit refused it at once."""
    with Served(replace(LIMITS, max_episodes=1)) as small, PolicyClient(small.endpoint, timeout_s=0.3) as client:
        episode = client.start_episode()
        with pytest.raises(NoFreePlaceError, match="1 episodes are open"):
            client.start_episode()
        client._timeout_s = TIMEOUT_S
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(client.start_episode)
            client.abort_episode(episode)
            client.end_episode(later.result(), [0, 0])


def test_a_start_without_an_answer_takes_one_place_however_often_it_is_repeated() -> None:
    """Earlier, each repetition took another one."""
    with Served(capacity=2) as small, PolicyClient(small.endpoint, timeout_s=TIMEOUT_S) as client:
        for _ in range(3):
            with unanswered(taken=True):
                client.start_episode()
        with unanswered(taken=False):
            client.start_episode(training_enabled=False)
        client.start_episode()
        client.start_episode(training_enabled=False)
        assert [episode.training_enabled for episode in small.episodes.episodes.values()] == [True, False]


def test_a_start_is_not_repeated_in_another_session(server: Served) -> None:
    with PolicyClient(server.endpoint, timeout_s=TIMEOUT_S) as client:
        with unanswered(taken=True):
            client.start_episode()
        closed = threading.Event()
        server.dispatcher.post(lambda sessions, now: (sessions.close(), closed.set()))
        assert closed.wait(TIMEOUT_S)
        client.end_episode(client.start_episode(), [0, 0])
    assert [episode.end for episode in server.episodes.episodes.values()] == ["client_left", "terminated"]


@pytest.mark.parametrize("by_tcp", [False, True])
def test_connecting_to_an_absent_server_raises_unreachable_error(by_tcp: bool, free_port: int, socket_dir: str) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port}" if by_tcp else f"ipc://{socket_dir}/clients-0"
    with pytest.raises(UnreachableError, match=f"no policy server answers at {endpoint}"):
        PolicyClient(endpoint, connect_timeout_s=0.2)


@pytest.mark.long
def test_requests_made_without_a_server_are_not_queued_for_the_next_server(free_port: int) -> None:
    request = request_of(ClientHeartbeat, token="0" * 32, session="0" * 32, request=1)
    own = OwnSockets(zmq.Context(), "a connection", 0.0)
    with closing(own), zmq.Context() as context:
        connection = Connection(own, ServerPlace(f"tcp://127.0.0.1:{free_port}"), None, agreed=True)
        seen: list[set[int]] = []
        for _ in range(2):
            with context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://127.0.0.1:{free_port}")
                with ThreadPoolExecutor(1) as pool:
                    asked = pool.submit(connection.ask, request, 3.0)
                    seen.append({decode(split_frame(router.recv_multipart()[1:])).header["request"]})
                    while router.poll(1500):
                        seen[-1].add(decode(split_frame(router.recv_multipart()[1:])).header["request"])
                    assert isinstance(asked.exception(100), UnreachableError)
            for _ in range(5):
                with pytest.raises(UnreachableError):
                    connection.ask(request, 0.2)
    assert len(seen[0]) == 1
    assert len(seen[1]) <= 2, "one that was asked before the connection was known to have ended may come too"


def test_a_server_with_keys_lets_in_only_clients_with_known_keys(tmp_path: Path) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    (others / "worker.public").write_bytes((keys / "worker.public").read_bytes())
    with Served(keys=port_keys(str(keys), CLIENT)) as server:
        with PolicyClient(server.endpoint, keys=str(keys)) as client:
            play(client)
        with pytest.raises(KeysRefusedError, match="does not let in the client key"):
            PolicyClient(server.endpoint, keys=str(others), connect_timeout_s=10)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_for_tcp_needs_keys_on_loopback_too(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^serving\.host: .*there are no keys.*broker\.allow_insecure"):
        RouterPort((host, 0), None, domain=CLIENT_PORT)


@pytest.mark.parametrize("mode", [0o710, 0o777])
def test_a_client_refuses_a_socket_in_a_folder_that_others_can_use(mode: int, socket_dir: str) -> None:
    with Served(socket_dir=socket_dir) as server:
        Path(socket_dir).chmod(mode)
        with pytest.raises(RunDirError, match=rf"others may use it \(mode 0{mode:o}\)"):
            PolicyClient(server.endpoint)


def test_nested_spaces_keep_their_nesting_and_dtypes() -> None:
    nested = Spaces(
        observation=Dict(
            spaces={"arm": Tuple(spaces=(Box(shape=(2,), dtype="<f4"), Discrete(n=3))), "a/b": MultiBinary(shape=(2,))}
        ),
        action=Discrete(n=1000),
    )
    with Served(ServingLimits(), spaces=nested) as server, PolicyClient(server.endpoint) as client:
        server.episodes.policy = lambda row: 0
        episode = client.start_episode()
        client.log_action(episode, {"arm": [[0.5, 1], 2], "a/b": [1, 0]}, 5)
        client.abort_episode(episode)
        seen = nest(nested.observation, server.episodes.episodes[episode].rows[0], "obs")
    assert list(seen) == ["arm", "a/b"]
    assert [(part.dtype.str, part.tolist()) for part in (*seen["arm"], seen["a/b"])] == [
        ("<f4", [0.5, 1.0]),
        ("<i8", 2),
        ("|i1", [1, 0]),
    ]
