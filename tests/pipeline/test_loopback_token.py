"""On loopback a broker of a run asks for the run's token. Peers of the same user find it, and others stay outside."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.credentials.keys import ENV_HOST, client_keys
from headrace.schemas.credentials.loopback_token import LoopbackToken, ServerToken, server_token, token_path
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import KeysError, KeysRefusedError
from headrace.schemas.peers.port_listing import PortListing, listed_token
from support.pipeline.delivery import (
    BrokerThread,
    Envs,
    StartBroker,
    StartFeeder,
    batches_of,
    broker_process,
)
from support.waiting import TIMEOUT_S, wait_until

JOIN_S = 3.0

_STRANGER = """
import sys, zmq
from headrace.learner_stub import EpisodeStream
from headrace.schemas.errors import KeysRefusedError
learner, weights, token = sys.argv[1:]
context = zmq.Context()
subscribers = [context.socket(zmq.SUB) for _ in range(2)]
subscribers[1].plain_username, subscribers[1].plain_password = b"worker", b"a word of their own!"
for subscriber in subscribers:
    subscriber.subscribe(b"")
    subscriber.connect(weights)

try:
    EpisodeStream(learner, connect_timeout_s=3)
except KeysRefusedError as error:
    print(error)
print("weights heard:", *(subscriber.poll(0) for subscriber in subscribers))
try:
    open(token).read()
except PermissionError:
    print("cannot read the token")
context.destroy(linger=0)
"""


@pytest.fixture
def another_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what this user keeps. It is not the one where peers look that began before."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    return tmp_path / "another home"


@pytest.fixture
def guarded(start_broker: StartBroker, tmp_path: Path) -> BrokerThread:
    """A broker that asks for the token of its run directory."""
    return start_broker(keys=server_token(tmp_path, asked=True))


def endpoints_of(run_dir: Path) -> Endpoints:
    file = read_broker_file(run_dir)
    assert file is not None
    return file.endpoints


def refusals(broker: BrokerThread) -> set[tuple[str, str]]:
    return broker.ask(lambda asked: set(asked.sockets.auth.refused))


def all_arrives(endpoints: Endpoints, start_feeder: StartFeeder, slot: int = 0) -> None:
    """A worker and a learner that know only addresses get through, with weights, from the first batch to the last."""
    feeder = start_feeder(endpoints.worker, Envs(slot).fragments(5), slot=slot)
    with (
        EpisodeStream(endpoints.learner, connect_timeout_s=TIMEOUT_S) as stream,
        WeightPublisher(endpoints.learner, connect_timeout_s=TIMEOUT_S) as weights,
    ):
        weights.publish({"w": np.zeros(3, np.float32)})
        steps = sum(batch.steps for batch in batches_of(stream, feeder.all_settled))
        wait_until(lambda: feeder.weights.newest > (0, 0), "the weights")
    assert steps == sum(feeder.steps.values()) > 0
    assert feeder.error is None


# -- the same user ----------------------------------------------------------------------------------------------------


def test_peers_of_the_same_user_need_only_the_address(guarded: BrokerThread, start_feeder: StartFeeder) -> None:
    all_arrives(guarded.endpoints, start_feeder)
    assert not refusals(guarded)


def test_the_token_is_private_and_stays_the_same(tmp_path: Path) -> None:
    first = server_token(tmp_path, asked=True)
    assert first is not None
    assert first == server_token(tmp_path, asked=True)
    assert stat.S_IMODE(token_path(tmp_path).stat().st_mode) == 0o600
    assert len(first.word) >= 64
    assert first.word not in repr(first)
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert server_token(tmp_path, asked=False) is None
    assert client_keys("", "worker", tmp_path) is None


def test_a_worker_that_starts_before_the_broker_gets_in(
    start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path, free_port: int
) -> None:
    feeder = start_feeder(f"tcp://127.0.0.1:{free_port}", Envs().fragments(3))
    start_broker(keys=server_token(tmp_path, asked=True), port=free_port)
    wait_until(feeder.all_shipped, "its batches")
    assert feeder.error is None


def test_live_peers_rejoin_a_broker_with_a_new_token(
    stack: ExitStack, start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    first = start_broker(keys=server_token(tmp_path, asked=True))
    feeder = start_feeder(first.endpoints.worker, Envs().fragments(40), window=4)
    stream = stack.enter_context(EpisodeStream(first.endpoints.learner, connect_timeout_s=TIMEOUT_S))
    weights = stack.enter_context(WeightPublisher(first.endpoints.learner, connect_timeout_s=TIMEOUT_S))
    weights.publish({"w": np.zeros(3, np.float32)})
    wait_until(lambda: stream.next(0.01) is not None, "the first batch")
    wait_until(lambda: feeder.weights.newest == (1, 1), "the weights")
    first.stop()
    token_path(tmp_path).unlink()
    second = start_broker(keys=server_token(tmp_path, asked=True))
    assert second.endpoints == first.endpoints
    for _ in batches_of(stream, feeder.all_settled):
        pass
    weights.publish({"w": np.zeros(3, np.float32)})
    wait_until(lambda: weights.pump() is None and feeder.weights.newest >= (1, 2), "later weights")
    assert feeder.error is None
    assert {("worker", "another token"), ("learner", "another token")} <= refusals(second)


@pytest.mark.long
def test_the_listing_of_a_killed_broker_misleads_no_peer(
    stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    """The next broker at its ports asks for no token. Peers that began before it get in, and new ones too."""
    with broker_process(tmp_path) as killed:
        endpoints = endpoints_of(tmp_path)
        feeder = start_feeder(endpoints.worker, Envs().fragments(40), window=4)
        stream = stack.enter_context(EpisodeStream(endpoints.learner, connect_timeout_s=TIMEOUT_S))
        wait_until(lambda: stream.next(0.01) is not None, "the first batch")
        port = int(endpoints.worker.rpartition(":")[2])
        listed = listed_token(port, "worker")
        assert listed is not None
        assert listed.word == read_token(token_path(tmp_path))
        killed.signal(signal.SIGKILL)
        killed.wait()
    assert listed.path.exists(), "the listing stays"
    assert listed_token(port, "worker") is None
    stack.enter_context(broker_process(tmp_path, allow_insecure=True))
    assert endpoints_of(tmp_path) == endpoints
    assert not token_path(tmp_path).exists()
    assert "every user of this machine is served without a token" in (tmp_path / "broker.log").read_text()
    for _ in batches_of(stream, feeder.all_settled):
        pass
    assert feeder.error is None
    stream.close()
    all_arrives(endpoints, start_feeder, slot=1)


def test_without_a_state_folder_peers_get_in_with_the_run_directory(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    guarded = start_broker(keys=server_token(tmp_path, asked=True))
    assert caplog.text.count("do not find their token") == 1
    for keys in (tmp_path, token_path(tmp_path)):
        with EpisodeStream(guarded.endpoints.learner, connect_timeout_s=TIMEOUT_S, keys=keys):
            pass
    with EpisodeStream.of(tmp_path, connect_timeout_s=TIMEOUT_S):
        pass
    monkeypatch.setenv("HEADRACE_KEYS__DIR", str(tmp_path))
    with EpisodeStream(guarded.endpoints.learner, connect_timeout_s=TIMEOUT_S):
        pass


# -- all others -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another user")
def test_another_user_can_neither_join_nor_hear_weights_nor_read_the_token(
    stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path, guarded: BrokerThread
) -> None:
    endpoints = guarded.endpoints
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    if subprocess.run([*become, sys.executable, "-c", "import headrace.learner_stub"], env=environment).returncode:
        pytest.skip("another user cannot import headrace from here")
    with WeightPublisher(endpoints.learner, connect_timeout_s=TIMEOUT_S) as weights:
        weights.publish({"w": np.zeros(3, np.float32)})
        command = [*become, sys.executable, "-c", _STRANGER, endpoints.learner, endpoints.weights]
        stranger = subprocess.run(
            [*command, str(token_path(tmp_path))], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        refused, *others = stranger.stdout.splitlines()
        assert refused.startswith(f"the broker at {endpoints.learner} "), stranger
        assert others == ["weights heard: 0 0", "cannot read the token"], stranger
        assert guarded.ask(lambda broker: broker.core.state.epoch) == 1, "no other learner has been heard"
    assert {("learner", "a peer that showed no token"), ("weights", "another token")} <= refusals(guarded)
    all_arrives(endpoints, start_feeder)


@pytest.mark.long
def test_a_peer_without_the_token_gets_an_error_with_advice(
    guarded: BrokerThread, start_feeder: StartFeeder, another_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feeder = start_feeder(guarded.endpoints.worker, join_s=JOIN_S)
    with pytest.raises(KeysRefusedError, match=r"(asks for|refuses peers without) keys; name .*, or the run directory"):
        EpisodeStream(guarded.endpoints.learner, connect_timeout_s=JOIN_S)
    wait_until(lambda: feeder.error is not None, "the end of the worker")
    assert isinstance(feeder.error, KeysRefusedError)
    assert {(port, "a peer that showed no token") for port in ("worker", "learner")} <= refusals(guarded)
    assert "refused at the worker port: a peer that showed no token" in caplog.text


def test_a_named_token_of_another_run_is_refused_at_once(
    guarded: BrokerThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that names no token finds the right one by itself."""
    other = tmp_path / "other"
    other.mkdir()
    server_token(other, asked=True)
    with pytest.raises(KeysRefusedError, match=r"does not let in the learner with the token in .*other/token"):
        EpisodeStream(guarded.endpoints.learner, connect_timeout_s=TIMEOUT_S, keys=other)
    with EpisodeStream(guarded.endpoints.learner, connect_timeout_s=TIMEOUT_S):
        pass
    assert ("learner", "another token") in refusals(guarded)
    assert "refused at the learner port: another token (from 127.0.0.1), 1 so far" in caplog.text


def test_the_right_token_opens_no_port_of_another_role(guarded: BrokerThread) -> None:
    with pytest.raises(KeysRefusedError, match="check that this is the port for a learner"):
        EpisodeStream(guarded.endpoints.worker, connect_timeout_s=TIMEOUT_S)


def test_a_token_is_never_shown_to_another_machine(tmp_path: Path) -> None:
    from headrace.schemas.peers.handshakes import Handshakes

    server_token(tmp_path, asked=True)
    keys = client_keys(tmp_path, "worker")
    assert Handshakes("tcp://127.0.0.1:5701", "worker", keys).options()
    for elsewhere in ("tcp://192.0.2.7:5701", "tcp://example.org:5701", f"ipc://{tmp_path}/x"):
        assert not Handshakes(elsewhere, "worker", keys).options()


# -- files ------------------------------------------------------------------------------------------------------------


def spoil_mode(path: Path) -> None:
    path.chmod(0o640)


def spoil_content(path: Path) -> None:
    path.write_bytes(b"two words\n")


def spoil_bytes(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def spoil_kind(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_mode, r"others may read it \(mode 0640\); chmod 600"),
        (spoil_content, "it should hold one word .*; .*start the fleet again: that makes another"),
        (spoil_bytes, "it is damaged: .*; .*start the fleet again: that makes another"),
        (spoil_kind, "it should hold one word"),
    ],
)
def test_a_token_that_cannot_be_trusted_is_refused(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    server_token(tmp_path, asked=True)
    spoil(token_path(tmp_path))
    with pytest.raises(KeysError, match=words):
        server_token(tmp_path, asked=True)
    with pytest.raises(KeysError, match=words):
        client_keys("", "worker", tmp_path)


def test_a_listing_lives_as_long_as_its_server(another_home: Path) -> None:
    first = PortListing(["tcp://127.0.0.1:5701"], "the-first-token-here")
    later = PortListing(["tcp://127.0.0.1:5701"], "the-later-token-here")
    first.remove()
    found = listed_token(5701, ENV_HOST)
    assert found == LoopbackToken(ENV_HOST, "the-later-token-here", Path())
    assert found is not None
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
    later.remove()
    assert listed_token(5701, ENV_HOST) is None
    assert not list((another_home / "headrace" / "ports").iterdir())


def test_the_next_server_removes_the_listings_of_killed_servers(another_home: Path) -> None:
    """The files of other machines and of living servers stay, and so do files of other kinds."""
    living = PortListing(["tcp://127.0.0.1:5701"], "the-first-token-here")
    folder = another_home / "headrace" / "ports"
    (first,) = folder.iterdir()
    host = first.name.removesuffix("-5701")
    for name in (f"{host}-5702", f"{host}-5703", "elsewhere-5702", "notes"):
        (folder / name).write_text("the-token-of-a-killed-server\n")
    half, fresh = folder / f".{host}-5704.77.0123abcd", folder / f".{host}-5705.78.0123abcd"
    for path in (half, fresh):
        path.touch()
    os.utime(half, (1.0, 1.0))
    later = PortListing(["tcp://127.0.0.1:5706"], "the-later-token-here")
    left = {path.name for path in folder.iterdir()}
    assert left == {f"{host}-5701", f"{host}-5706", "elsewhere-5702", "notes", fresh.name}
    assert listed_token(5701, "worker") is not None
    living.remove()
    later.remove()


def test_a_token_matches_only_as_a_whole() -> None:
    token = ServerToken("a token of this run")
    assert token.role_of((b"worker", b"a token of this run")) == "worker"
    for shown in ((b"worker", b"a token of this"), (b"worker", b"\xff"), (b"worker",), (b"worker", b"")):
        assert not token.role_of(shown)
