"""Keys on real sockets: the fleet's keys work end to end. Any other key is refused with an error, and counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq

from headrace.deploy.fleet.obituary_sender import ObituarySender
from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.run.key_pairs import add_key, make_keys, revoke_key
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.accounts.redis_keys import revoked_sessions
from headrace.schemas.credentials.keys import (
    ADMITTED,
    BROKER,
    ENV_HOST,
    ClientKeys,
    port_keys,
    read_broker_keys,
    read_client_keys,
)
from headrace.schemas.errors import (
    ConfigError,
    ExitCode,
    KeysError,
    KeysRefusedError,
    RefusedError,
    UnreachableError,
)
from headrace.schemas.frames.wire import MessageKind, decode_header
from headrace.schemas.messages import Obituary, WeightsPull
from headrace.schemas.peers import sockets
from headrace.schemas.settings.config import FleetConfig, KeysSection
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.fleet.membership import Membership
from headrace.workers.fleet.session import SessionState
from support.pipeline.delivery import FLEET, BrokerThread, Envs, Feeder, StartBroker, StartFeeder, batches_of
from support.waiting import TIMEOUT_S, wait_until

JOIN_S = 3.0
MISLED = "a peer that expects another broker's key"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fleet's keys."""
    folder = tmp_path_factory.mktemp("ours")
    make_keys(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another fleet's keys."""
    folder = tmp_path_factory.mktemp("theirs")
    make_keys(folder)
    return folder


@pytest.fixture
def strangers(tmp_path: Path, ours: Path, theirs: Path) -> Path:
    """The secrets of another fleet, and the public key of our broker, which is no secret."""
    folder = tmp_path / "strangers"
    shutil.copytree(theirs, folder)
    shutil.copy(ours / "broker.public", folder)
    return folder


@pytest.fixture
def misled(tmp_path: Path, ours: Path, theirs: Path) -> Path:
    """The right secrets, and the public key of another broker."""
    folder = tmp_path / "misled"
    shutil.copytree(ours, folder)
    shutil.copy(theirs / "broker.public", folder)
    return folder


@pytest.fixture
def guarded(start_broker: StartBroker, ours: Path) -> BrokerThread:
    """A broker with keys."""
    return start_broker(keys=read_broker_keys(ours))


def keys_of(folder: Path, role: str = "worker") -> ClientKeys:
    return read_client_keys(folder, role)


def refusals(broker: BrokerThread, port: str) -> dict[str, int]:
    """Why, and how often, somebody was turned away at a port."""
    counts = broker.ask(lambda asked: dict(asked.sockets.auth.refused))
    return {why: count for (at, why), count in counts.items() if at == port}


def end_of(feeder: Feeder) -> KeysRefusedError:
    """The refusal that ended a worker's session."""
    wait_until(lambda: feeder.error is not None, "the end of a worker that is not let in")
    assert isinstance(feeder.error, KeysRefusedError), feeder.error
    assert feeder.error.exit_code is ExitCode.KEYS
    return feeder.error


def assert_all_arrives(broker: BrokerThread, ours: Path, stack: ExitStack, slot: int) -> None:
    """A worker and a learner with the fleet's keys still get through, from the first batch to the last commit."""
    feeder = stack.enter_context(
        Feeder(broker.endpoints.worker, Envs(slot).fragments(5), slot=slot, keys=keys_of(ours))
    )
    with EpisodeStream(broker.endpoints.learner, keys=ours, connect_timeout_s=TIMEOUT_S) as stream:
        steps = sum(batch.steps for batch in batches_of(stream, feeder.all_settled))
    assert steps == sum(feeder.steps.values()) > 0


# -- the right ones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 700_000], ids=["broadcast", "pulled"])
def test_with_the_fleets_keys_chunks_and_weights_arrive(
    guarded: BrokerThread, ours: Path, start_feeder: StartFeeder, stack: ExitStack, size: int
) -> None:
    feeder = start_feeder(guarded.endpoints.worker, Envs().fragments(20), keys=keys_of(ours))
    stream = stack.enter_context(EpisodeStream(guarded.endpoints.learner, keys=str(ours), connect_timeout_s=TIMEOUT_S))
    weights = stack.enter_context(WeightPublisher(guarded.endpoints.learner, keys=keys_of(ours, "learner")))
    weights.publish({"w": np.arange(size, dtype=np.float32)})
    assert sum(batch.steps for batch in batches_of(stream, feeder.all_settled)) == sum(feeder.steps.values())
    wait_until(lambda: feeder.weights.newest == (1, 1), "the weights")
    taken = feeder.weights.take()
    assert taken is not None
    assert taken.arrays["w"][-1] == size - 1
    assert guarded.ask(lambda broker: not broker.sockets.auth.refused)


def test_a_reader_of_another_group_shows_the_learners_key(
    guarded: BrokerThread, ours: Path, start_feeder: StartFeeder
) -> None:
    feeder = start_feeder(guarded.endpoints.worker, Envs().fragments(3), keys=keys_of(ours))
    with EpisodeStream(guarded.endpoints.learner, keys=ours, group="record", connect_timeout_s=TIMEOUT_S) as stream:
        assert sum(batch.steps for batch in batches_of(stream, feeder.all_shipped)) == sum(feeder.steps.values()) > 0


@pytest.mark.long
def test_without_an_argument_the_environment_variable_names_the_keys_folder(
    guarded: BrokerThread, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KEYS__DIR", str(ours))
    with EpisodeStream(guarded.endpoints.learner, connect_timeout_s=TIMEOUT_S) as stream:
        assert stream.epoch == 1
    with pytest.raises(KeysRefusedError):
        EpisodeStream(guarded.endpoints.learner, keys="", connect_timeout_s=JOIN_S)


def test_a_restarted_broker_lets_its_worker_and_learner_in_again(
    start_broker: StartBroker, ours: Path, start_feeder: StartFeeder, stack: ExitStack
) -> None:
    first = start_broker(keys=read_broker_keys(ours))
    feeder = start_feeder(first.endpoints.worker, Envs().fragments(40), window=4, keys=keys_of(ours))
    stream = stack.enter_context(EpisodeStream(first.endpoints.learner, keys=ours))
    assert stream.next(timeout_s=TIMEOUT_S) is not None
    first.stop()
    second = start_broker(keys=read_broker_keys(ours))
    assert second.endpoints == first.endpoints
    for _ in batches_of(stream, feeder.all_settled):
        pass
    assert feeder.error is None


def test_the_supervisor_reports_a_death_with_its_own_key(guarded: BrokerThread, ours: Path, tmp_path: Path) -> None:
    loop = EventLoop()
    told = ObituarySender(loop, guarded.endpoints.worker, FLEET, tmp_path, keys_of(ours, "supervisor"))
    told.send(Obituary(slot=0, incarnation=1, totals=WorkerTotals(), settled=Settled(), reason="worker_killed"))
    with EpisodeStream(
        guarded.endpoints.learner, keys=ours, connect_timeout_s=TIMEOUT_S
    ):  # whom the broker hears first
        assert loop.turn_until(told.all_acknowledged, TIMEOUT_S)
    told.close()


# -- all others -------------------------------------------------------------------------------------------------------


def test_a_peer_with_another_fleets_key_is_refused_at_once_and_logged(
    guarded: BrokerThread, ours: Path, strangers: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    feeder = stack.enter_context(Feeder(guarded.endpoints.worker, keys=keys_of(strangers)))
    assert f"does not let in the worker key {keys_of(strangers).public[:8].decode()}" in str(end_of(feeder))
    assert refusals(guarded, "worker") == {"an unknown key": 1}
    with pytest.raises(KeysRefusedError, match=r"does not let in the learner key .* copy learner\.secret"):
        EpisodeStream(guarded.endpoints.learner, keys=strangers)
    with pytest.raises(KeysRefusedError):
        WeightPublisher(guarded.endpoints.learner, keys=strangers)
    assert refusals(guarded, "learner") == {"an unknown key": 2}
    assert "refused at the worker port: an unknown key" in caplog.text
    assert "from 127.0.0.1), 1 so far" in caplog.text
    assert_all_arrives(guarded, ours, stack, slot=1)


@pytest.mark.parametrize("port", ADMITTED)
@pytest.mark.parametrize("role", ["broker", "worker", "learner", "supervisor"])
def test_each_port_takes_keys_of_its_own_roles_only(guarded: BrokerThread, ours: Path, port: str, role: str) -> None:
    own, broker = read_broker_keys(ours).secret, keys_of(ours).broker
    public = next((public for public, name in read_broker_keys(ours).roles.items() if name == role), broker)
    secret = own if role == BROKER else keys_of(ours, role).secret
    kind = zmq.SUB if port == "weights" else zmq.DEALER
    outcome = handshake(getattr(guarded.endpoints, port), ClientKeys(role, public, secret, broker, ours), kind)
    assert outcome is (zmq.Event.HANDSHAKE_SUCCEEDED if role in ADMITTED[port] else zmq.Event.HANDSHAKE_FAILED_AUTH)
    why = "an unknown key" if role == BROKER else f"a {role} key"
    assert refusals(guarded, port) == ({} if role in ADMITTED[port] else {why: 1})


def test_a_port_without_a_zap_authenticator_lets_no_peer_in(ours: Path) -> None:
    """A socket has the broker's options in a context without a ZAP authenticator, as while a broker stops."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        for name, value in read_broker_keys(ours).options("worker").items():
            socket.setsockopt(getattr(zmq, name), value)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        assert handshake(f"tcp://127.0.0.1:{port}", keys_of(ours)) is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    finally:
        context.destroy(linger=0)


def handshake(endpoint: str, keys: ClientKeys, kind: int = zmq.DEALER) -> zmq.Event:
    """How the first handshake of a bare socket ends."""
    ends = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    context = zmq.Context()
    try:
        socket = context.socket(kind)
        for name, value in (sockets.COMMON | keys.options()).items():
            socket.setsockopt(getattr(zmq, name), value)
        monitor = socket.get_monitor_socket(ends)
        socket.connect(endpoint)
        assert monitor.poll(100_000), "no handshake"
        return zmq.Event(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
    finally:
        context.destroy(linger=0)


def test_a_learners_key_at_the_workers_port_gives_an_error_about_the_port(guarded: BrokerThread, ours: Path) -> None:
    with pytest.raises(KeysRefusedError, match="check that this is the port for a learner"):
        EpisodeStream(guarded.endpoints.worker, keys=ours)


@pytest.mark.long
def test_a_peer_without_keys_is_refused_when_its_connect_timeout_ends(
    guarded: BrokerThread, ours: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    feeder = stack.enter_context(Feeder(guarded.endpoints.worker, join_s=JOIN_S))
    assert "name their folder in keys.dir" in str(end_of(feeder))
    for connect in (EpisodeStream, WeightPublisher):
        with pytest.raises(KeysRefusedError, match=r"name their folder in keys\.dir"):
            connect(guarded.endpoints.learner, connect_timeout_s=JOIN_S)
    assert refusals(guarded, "worker")["a peer that showed no key"] > 0
    assert "refused at the learner port: a peer that showed no key" in caplog.text
    assert_all_arrives(guarded, ours, stack, slot=1)


def test_a_peer_with_keys_is_refused_by_a_broker_without_keys(
    broker: BrokerThread, ours: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    feeder = stack.enter_context(Feeder(broker.endpoints.worker, keys=keys_of(ours), join_s=JOIN_S))
    assert "keys" in str(end_of(feeder))
    with pytest.raises(KeysRefusedError):
        EpisodeStream(broker.endpoints.learner, keys=ours, connect_timeout_s=JOIN_S)
    wait_until(lambda: refusals(broker, "worker") and refusals(broker, "learner"), "the count of refusals")
    assert "at a broker without" in caplog.text
    with EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S) as stream:
        assert stream.epoch == 1


@pytest.mark.long
def test_a_learner_with_a_wrong_broker_key_gets_an_error_that_names_the_file(
    guarded: BrokerThread, misled: Path
) -> None:
    with pytest.raises(KeysRefusedError, match=r"another key than that in .*broker\.public, or none, or is too busy"):
        EpisodeStream(guarded.endpoints.learner, keys=misled, connect_timeout_s=JOIN_S)
    assert refusals(guarded, "learner")[MISLED] > 0


@pytest.mark.long
def test_a_worker_that_retries_with_a_wrong_broker_key_does_not_fill_the_log(
    guarded: BrokerThread, misled: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    stack.enter_context(Feeder(guarded.endpoints.worker, keys=keys_of(misled), join_s=JOIN_S))
    wait_until(lambda: refusals(guarded, "worker").get(MISLED, 0) >= 5, "five attempts")
    lines = [record.getMessage() for record in caplog.records if "refused at the worker port" in record.getMessage()]
    assert [line.split()[-3] for line in lines] == ["1", "2", "4"]
    assert "breaks off each handshake (3 so far)" in caplog.text, "and the worker says why it waits"


def test_a_supervisor_with_a_foreign_key_logs_its_refusal(
    guarded: BrokerThread, strangers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EventLoop()
    told = ObituarySender(loop, guarded.endpoints.worker, FLEET, tmp_path, keys_of(strangers, "supervisor"))
    assert loop.turn_until(lambda: "does not let in the supervisor key" in caplog.text, TIMEOUT_S)
    told.close()


def test_a_missing_broker_is_reported_as_unreachable_also_with_keys(free_port: int, ours: Path) -> None:
    with pytest.raises(UnreachableError, match=f"{free_port} after 0.3 s"):
        EpisodeStream(f"tcp://127.0.0.1:{free_port}", connect_timeout_s=0.3, keys=ours)


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, ours: Path) -> Path:
    """The fleet's keys in a folder that the test may change."""
    return Path(shutil.copytree(ours, tmp_path / "mine"))


def is_active(feeder: Feeder) -> bool:
    assert feeder.error is None, feeder.error
    return feeder.session.state is SessionState.ACTIVE


def why_ended(feeder: Feeder) -> str:
    """The sentence with which the broker ended a session because of its key."""
    wait_until(lambda: feeder.error is not None, "the end of a session")
    assert isinstance(feeder.error, RefusedError), feeder.error
    assert feeder.error.exit_code is ExitCode.KEYS
    return str(feeder.error)


def next_event(monitor: zmq.Socket[bytes]) -> zmq.Event:
    assert monitor.poll(100_000), "no event"
    return zmq.Event(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))


@pytest.mark.parametrize("host", ["127.0.0.1", ""], ids=["tcp", "ipc"])
def test_a_key_is_added_and_revoked_while_the_broker_runs(
    start_broker: StartBroker,
    start_feeder: StartFeeder,
    folder: Path,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    host: str,
) -> None:
    keys = read_broker_keys(folder)
    broker = start_broker(keys=keys, host=host)
    staying = start_feeder(broker.endpoints.worker, keys=keys_of(folder))
    add_key(folder, "worker", "gpu")
    gpu, public = read_client_keys(folder, "worker", "gpu"), (folder / "worker.gpu.public").read_text()
    wait_until(lambda: broker.ask(lambda _: keys.known.find(gpu.public)), "the new key is known")
    leaving = start_feeder(broker.endpoints.worker, slot=None, keys=gpu)
    wait_until(lambda: is_active(staying) and is_active(leaving), "both workers join")
    socket, monitor = connected(zmq.SUB, gpu, broker, stack)
    socket.subscribe(b"")
    wait_until(lambda: broker.ask(lambda asked: len(asked.keyed._connections)) == 5, "all subscriptions")
    (folder / "worker.broken.public").write_text("role = ")
    revoke_key(folder, "worker", "gpu")
    assert "the worker.gpu key" in why_ended(leaving)
    assert next_event(monitor) is zmq.Event.DISCONNECTED, "a peer that only listens hears no more weights"
    (folder / "worker.gpu.public").write_text(public)  # somebody copies it back
    end_of(start_feeder(broker.endpoints.worker, slot=None, keys=gpu))
    assert refusals(broker, "worker") == {"a revoked key": 1}
    assert is_active(staying)
    assert "worker.broken.public cannot be used: it is damaged" in caplog.text
    gauges = broker.report().gauges
    assert revoked_sessions(gauges) == {"worker.gpu": 1}


@pytest.mark.long
def test_a_peer_whose_key_is_revoked_gets_no_weights_at_any_port(
    start_broker: StartBroker, folder: Path, stack: ExitStack
) -> None:
    """Neither by subscription nor by pull, also on a connection that was open and silent before the revocation."""
    add_key(folder, "worker", "gpu")
    gpu = read_client_keys(folder, "worker", "gpu")
    broker = start_broker(keys=read_broker_keys(folder))
    publisher = stack.enter_context(WeightPublisher(broker.endpoints.learner, keys=keys_of(folder, "learner")))
    publisher.publish({"w": np.arange(10, dtype=np.float32)})
    wait_until(lambda: broker.ask(lambda asked: asked.relay.version[1] == 1), "the weights")
    ears, mouth = connected(zmq.SUB, gpu, broker, stack), connected(zmq.DEALER, gpu, broker, stack)
    revoke_key(folder, "worker", "gpu")
    wait_until(lambda: broker.ask(lambda asked: asked.keyed.known.find(gpu.public).revoked), "the revocation")
    ears[0].subscribe(b"")
    mouth[0].send_multipart(WeightsPull(version=(1, 1), offset=0, length=1 << 20).frames())
    assert mouth[0].poll(100_000), "an answer"
    kind, header = decode_header(mouth[0].recv_multipart())
    assert kind is MessageKind.REJECT
    assert header["code"] == "key_revoked"
    assert (
        "ask the person who runs the broker for another key (headrace keys add worker --group gpu)" in header["detail"]
    )
    for socket, monitor in (ears, mouth):
        assert next_event(monitor) is zmq.Event.DISCONNECTED
        assert not socket.poll(0), "it has got weights"


def connected(
    kind: int, keys: ClientKeys, broker: BrokerThread, stack: ExitStack
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A bare socket that has been let in and is silent, and its monitor."""
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    socket = stack.enter_context(context.socket(kind))
    for name, value in (sockets.COMMON | keys.options()).items():
        socket.setsockopt(getattr(zmq, name), value)
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
    stack.enter_context(monitor)
    socket.connect(broker.endpoints.weights if kind == zmq.SUB else broker.endpoints.worker)
    assert next_event(monitor) is zmq.Event.HANDSHAKE_SUCCEEDED
    return socket, monitor


def test_a_workers_port_lets_in_all_groups_of_env_hosts_until_their_key_is_revoked(folder: Path) -> None:
    add_key(folder, ENV_HOST, "lab")
    port = RouterPort(("127.0.0.1", 0), port_keys(str(folder), ENV_HOST))
    try:
        outcomes = [knock(port, read_client_keys(folder, ENV_HOST, group)) for group in ("", "lab")]
        lab = read_client_keys(folder, ENV_HOST, "lab")
        revoke_key(folder, ENV_HOST, "lab")
        port._keys.known.look(0.0)  # type: ignore[union-attr]
        outcomes.append(knock(port, lab))
    finally:
        port.close()
    accepted, refused = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.HANDSHAKE_FAILED_AUTH
    assert outcomes == [accepted, accepted, refused]


def knock(port: RouterPort, keys: ClientKeys) -> zmq.Event:
    """How a handshake at this port ends, while its owner looks at it now and then."""
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(handshake, port.endpoint, keys)
        while not outcome.done():
            port.wait(0.01)
        return outcome.result()


# -- files and addresses ----------------------------------------------------------------------------------------------


def spoil_mode(path: Path) -> None:
    path.chmod(0o640)


def spoil_character(path: Path) -> None:
    text = path.read_text()
    place = text.index('secret = "') + 12
    path.write_text(text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :])


def spoil_length(path: Path) -> None:
    path.write_text(path.read_text()[:60])


def spoil_bytes(path: Path) -> None:
    path.write_bytes(b"\xff\x00")


def spoil_name(path: Path) -> None:
    path.write_text((path.parent / "learner.secret").read_text())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_mode, r"others may read it \(mode 0640\); chmod 600 .*worker\.secret"),
        (spoil_character, "it is damaged: its checksum is that of other content"),
        (spoil_length, "it is damaged"),
        (spoil_bytes, "it is damaged: is not TOML"),
        (spoil_name, "it is the key of a learner, under another name"),
        (Path.unlink, "there is no such file; copy it from where the fleet's keys were made"),
    ],
)
def test_a_key_file_that_cannot_be_trusted_is_refused(
    ours: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "keys"
    shutil.copytree(ours, folder)
    spoil(folder / "worker.secret")
    config = FleetConfig(keys=KeysSection(dir=str(folder)))
    with pytest.raises(KeysError, match=words) as caught:
        Membership(config, "tcp://127.0.0.1:9", FLEET, None, 0, tmp_path)
    assert caught.value.path == str(folder / "worker.secret")
    assert "secret = " not in str(caught.value)


def test_the_repr_of_keys_shows_no_secret(ours: Path) -> None:
    keys = keys_of(ours)
    assert keys.secret.decode() not in repr(keys)
    assert read_broker_keys(ours).secret.decode() not in repr(read_broker_keys(ours))


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_tcp_is_served_with_keys_only_on_loopback_too(
    ours: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    with pytest.raises(ConfigError, match=r"broker\.host: .* serves by TCP, and there are no keys; name their folder"):
        BrokerThread(tmp_path, host=host)
    BrokerThread(tmp_path, keys=read_broker_keys(ours), host=host).broker.close()
    assert "without encryption" not in caplog.text
    BrokerThread(tmp_path, host=host, allow_insecure=True).broker.close()
    assert f"serving {host} without encryption" in caplog.text
