"""Fuzzing of a whole fleet of real processes: strangers send nonsense to each address of its broker, and to its page.

`fleet` has Unix sockets, and strangers are processes of its user. `keyed_fleet` has TCP, and strangers have keys of the
fleet; some have none, and send bytes in place of a handshake.

A schedule has two turns, of a length each: in one they send it to the fleet, in the other to a sink beside it, which
costs the machine the same. All processes of the fleet must live, and keep within the memory that the settings allow.
When all schedules are over, the fleet drains: its books must be exact, also to the audit that compares them with files.
The rates of honest steps in both turns are printed.

No stranger says a HELLO that the broker accepts: what a peer with a key may do then, it may do in earnest.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import golden_samples
import zmq
from fuzz.mutations import Mutator, peek, sealed

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.credentials.keys import read_client_keys
from headrace.schemas.frames.wire import Buffer, MessageKind
from support.fleets.running_fleet import RunningFleet
from support.pipeline.delivery import RawPeer
from support.raw_zmtp import RawZmtp, command, frame, memory_of
from support.serving.raw_http import RawHttp

TURN_S = float(os.environ.get("FUZZ_TURN_S", "5"))
ROLES = ("worker", "learner", "weights")
MESSAGES_PER_S = 1000
"""Of all strangers together. Unpaced they would be a test of how two cores share their time."""
HONEST_SLOTS = range(2)
HELD_BYTES, BATCH_BYTES = 64 << 20, 4 << 20
GROWTH = {"broker": HELD_BYTES + 2 * (128 << 20)}
"""Bytes by which a process may grow from its size before: the broker by the batches that it may hold, and by the
unfinished messages of strangers at two ports (docs/internals/threat-model.md).
"""
OTHERS_GROWTH = 128 << 20
SETTINGS = {"max_held_bytes": HELD_BYTES, "max_batch_bytes": BATCH_BYTES}
_SAMPLES = [frames for _, frames in golden_samples.golden()]
# Of bytes that no damage turns into frames. Zeros become empty frames, which take much memory.
_NEVER_ENDS = frame(b"\xff" * (1 << 18), more=True)
_CURVE_HELLO = b"\1\0" + bytes(72)
_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Number: 1\r\n\r\n"


class Strangers:
    """One schedule's strangers. Each `say` sends one message to one of `ports`, or to the `page`."""

    def __init__(
        self,
        seed: int,
        fleet_id: str,
        ports: Mapping[str, str],
        page: str,
        said: Counter[str],
        stack: ExitStack,
        keys: Path | None,
    ) -> None:
        """`keys`: the folder of the fleet's keys, if its ports have any."""
        self._mutator, self._said, self._stack, self._keys = Mutator(seed, "fleet"), said, stack, keys
        self._fleet_id, self._ports, self._page = fleet_id, ports, page
        self._slots = itertools.count(5000 + 1000 * (seed % 1000))
        self._peers: dict[str, tuple[RawPeer, int]] = {}
        self._raw: dict[str, RawZmtp] = {}

    def say(self) -> None:
        rng = self._mutator.random
        role = rng.choice(("worker", "worker", "worker", "learner", "learner", "weights"))
        match rng.randrange(20):
            case 0:
                self._say_to_page()
            case 1 | 2:
                self._say_raw(role)
            case _ if role == "weights":
                self._say_raw(role)
            case _:
                self._say_mutated(role)

    def _say_mutated(self, role: str) -> None:
        """Send a mutated message, of a slot that no worker has."""
        rng = self._mutator.random
        peer, slot = self._peers.get(role) or self._new_peer(role)
        frames = rng.choice(_SAMPLES)
        kind, header, _ = peek(frames)
        assert kind is not None
        if rng.random() < 0.7:
            own: dict[str, Any] = {"fleet_id": self._fleet_id, "slot": slot, "incarnation": 1}
            header |= {name: value for name, value in own.items() if name in header and "role" not in header}
            payload = header.pop("payload", None)
            frames = sealed(kind, header, [bytes(part) for part in frames[2:]], payload["arrays"] if payload else [])
        if rng.random() < 0.9:
            frames = self._mutator.message(frames)
        if not _is_accepted(frames, self._fleet_id):
            peer.socket.send_multipart(frames, copy=False)
            self._said[f"{role}: {kind.name}"] += 1
        if rng.random() < 1 / 64:
            self._peers.pop(role)[0].__exit__()

    def _new_peer(self, role: str) -> tuple[RawPeer, int]:
        keys = read_client_keys(self._keys, role) if self._keys is not None else None
        peer, slot = RawPeer(self._ports[role], role, keys), next(self._slots)
        self._stack.callback(peer.__exit__)
        self._peers[role] = peer, slot
        return peer, slot

    def _say_raw(self, role: str) -> None:
        """Send bytes that no libzmq sends: damaged frames or handshakes, and messages that never end."""
        rng, kind = self._mutator.random, b"SUB" if role == "weights" else b"DEALER"
        mechanism = b"NULL" if self._keys is None else b"CURVE"
        raw = self._raw.get(role)
        if raw is None:
            try:
                raw = self._raw[role] = self._stack.enter_context(RawZmtp(self._ports[role], kind, mechanism))
            except (OSError, AssertionError):  # messages of the connection before count on the one with its descriptor
                return
        data = b"\1" + rng.randbytes(4) if role == "weights" else bytes(rng.choice(_SAMPLES)[0])
        if self._keys is not None:  # its first command, with a key and a box that are none
            data = _CURVE_HELLO + rng.randbytes(120)
            said = rng.choice((command(b"HELLO", data), self._mutator.data(command(b"HELLO", data)), _NEVER_ENDS))
        else:
            said = rng.choice((frame(data, more=False), self._mutator.data(frame(data, more=True)), _NEVER_ENDS))
        if not raw.send(said) or rng.random() < 0.05:
            self._raw.pop(role).__exit__()
        self._said[f"{role}: bytes"] += 1

    def _say_to_page(self) -> None:
        with suppress(OSError), RawHttp(self._page) as page:
            page.say(self._mutator.data(_GET))
        self._said["page: request"] += 1


def _is_accepted(frames: Sequence[Buffer], fleet_id: str) -> bool:
    """Return whether this may be a HELLO that the broker accepts. A learner's without a fleet is one for any fleet."""
    kind, header, _ = peek(frames)
    return kind is MessageKind.HELLO and header.get("fleet_id") in (fleet_id, "", None)


class FuzzedFleet:
    """A fleet, its processes as they were before the first message of a stranger, and its rates."""

    def __init__(self, fleet: RunningFleet, keys: Path | None) -> None:
        self.fleet, self._keys = fleet, keys
        self._pids = self._processes()
        self._before = {name: memory_of(pid) for name, pid in self._pids.items()}
        self._most = dict(self._before)
        self._honest: dict[bool, list[float]] = {False: [], True: []}
        """The rates of honest steps, by whether strangers spoke to the fleet."""

    def play(self, seed: int, said: Counter[str]) -> None:
        """Play both turns of a schedule, that with strangers at the fleet first in every second one."""
        page = read_fleet_file(self.fleet.run_dir / "fleet.json")
        for to_fleet in (False, True) if seed % 2 else (True, False):
            with ExitStack() as stack:
                if to_fleet:
                    ports = {role: self.fleet.endpoint(role) for role in ROLES}
                    own = page.endpoints["dashboard"]
                    strangers = Strangers(seed, page.fleet_id, ports, own, said, stack, self._keys)
                else:
                    ports, sink = stack.enter_context(_sink())
                    strangers = Strangers(seed, page.fleet_id, ports, sink, Counter(), stack, None)
                self._turn(strangers, to_fleet=to_fleet)

    def _turn(self, strangers: Strangers, *, to_fleet: bool) -> None:
        began, before, said = time.monotonic(), self._steps(), 0
        while (elapsed := time.monotonic() - began) < TURN_S:
            if said < elapsed * MESSAGES_PER_S:
                strangers.say()
                said += 1
            else:
                time.sleep(0.002)
            if said % 200 == 0:
                self._check()
        self._honest[to_fleet].append((self._steps() - before) / elapsed)
        self._check()

    def _check(self) -> None:
        """Check that each process lives, and that none has grown beyond its bound."""
        assert self._processes() == self._pids, f"{self._pids} became {self._processes()}:\n{self.fleet.said()}"
        for name, pid in self._pids.items():
            rss = memory_of(pid)
            self._most[name] = max(self._most[name], rss)
            grown, most = rss - self._before[name], GROWTH.get(name, OTHERS_GROWTH)
            assert grown < most, f"{name} grew by {grown >> 20} MiB; {most >> 20} are allowed"

    def _processes(self) -> dict[str, int]:
        told = read_fleet_file(self.fleet.run_dir / "fleet.json").processes
        return {f"{it.role}{'' if it.slot is None else it.slot}": it.pid for it in told}

    def _steps(self) -> int:
        readings = (read_recorder(self.fleet.run_dir / f"recorders/worker-{slot}-1.rec") for slot in HONEST_SLOTS)
        return sum(reading.totals.stepped for reading in readings if reading is not None)

    def finish(self) -> None:
        """Drain the fleet, and check its end and its books. Print the rates and the memory."""
        self.fleet.terminate()
        result = self.fleet.finish()
        assert result["returncode"] == 0, result["stderr"]
        log = (self.fleet.run_dir / "logs" / "broker.log").read_text(errors="replace")
        assert not any(result["restarts"].values()), f"{result['restarts']}\n{result['stderr']}\n{log[-20_000:]}"
        for audit in (self.fleet.audit(), self.fleet.deep_audit()):
            assert audit.returncode == 0, audit.stdout + audit.stderr
        for log in (self.fleet.run_dir / "logs").iterdir():
            assert "Traceback" not in log.read_text(errors="replace"), f"{log}:\n{log.read_text(errors='replace')}"
        alone, beside = (sum(rates) / max(1, len(rates)) for rates in (self._honest[False], self._honest[True]))
        sizes = ", ".join(f"{name} {most >> 20} ({self._before[name] >> 20})" for name, most in self._most.items())
        sys.stdout.write(
            f"fleet: {alone:,.0f} honest steps a second beside nonsense to a sink, {beside:,.0f} beside nonsense to it "
            f"({100 * beside / max(alone, 1):.0f} %)\nfleet: most MiB (before): {sizes}\n"
        )


@contextmanager
def _sink() -> Iterator[tuple[dict[str, str], str]]:
    """Yield the endpoints of ports, by role, and the URL of a page. A thread receives what comes, and drops it."""
    ended = threading.Event()
    with zmq.Context() as context, ExitStack() as stack:
        poller, endpoints = zmq.Poller(), dict[str, str]()
        for role in ROLES:
            port = stack.enter_context(context.socket(zmq.XPUB if role == "weights" else zmq.ROUTER))
            endpoints[role] = f"tcp://127.0.0.1:{port.bind_to_random_port('tcp://127.0.0.1')}"
            poller.register(port, zmq.POLLIN)
        page = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        page.setblocking(False)

        def drop() -> None:
            while not ended.is_set():
                for port, _ in poller.poll(20):
                    with suppress(zmq.Again):
                        while True:
                            port.recv_multipart(zmq.DONTWAIT, copy=False)
                with suppress(BlockingIOError):
                    while True:
                        page.accept()[0].close()

        dropping = threading.Thread(target=drop, name="sink")
        dropping.start()
        stack.callback(dropping.join)
        stack.callback(ended.set)
        yield endpoints, f"http://127.0.0.1:{page.getsockname()[1]}"


def fleet() -> AbstractContextManager[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the schedule of a seed beside one fleet, whose end is judged at the end."""
    return _fleet()


def keyed_fleet() -> AbstractContextManager[Callable[[int, Counter[str]], None]]:
    """Do the same beside a fleet that listens by TCP."""
    return _fleet("--listen", "127.0.0.1")


@contextmanager
def _fleet(*listen: str) -> Iterator[Callable[[int, Counter[str]], None]]:
    broker = [option for name, value in SETTINGS.items() for option in ("--set", f"broker.{name}={value}")]
    run = ("--workers", str(len(HONEST_SLOTS)), "--num-envs", "8", "--dashboard", "--timeout-s", "86400", *broker)
    with tempfile.TemporaryDirectory() as folder, RunningFleet(Path(folder), *run, *listen) as running:
        running.wait_until(lambda: running.steps() > 3000 and _page_serves(running), "training has begun")
        fuzzed = FuzzedFleet(running, Path(folder, "keys") if listen else None)
        yield fuzzed.play
        fuzzed.finish()


def _page_serves(running: RunningFleet) -> bool:
    with suppress(OSError, KeyError), RawHttp(read_fleet_file(running.run_dir / "fleet.json").endpoints["dashboard"]):
        return True
    return False
