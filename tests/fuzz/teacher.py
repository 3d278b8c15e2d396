"""Fuzzing of tasks: a broker lies to a teacher, and teachers lie to a broker's board. Honest ones still get through."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz.lying_broker import Frames, LyingBroker
from fuzz.mutations import Mutator, peek, uncounted

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.reports.task_board import KeptTasks, TaskBoard
from headrace.broker.sessions.core import BrokerCore
from headrace.learner_stub import TaskPublisher, spread
from headrace.schemas.errors import DecodeError, HeadraceError
from headrace.schemas.frames.wire import MessageKind, decode_header
from headrace.schemas.messages import Fenced, Message, Reject, Tasks, TasksAck, TeacherHello, read, read_hello

FLEET = "f"
LIES = 100
PUBLISHED = 3
DEADLINE_S = 60.0
_LAST = (Fenced(detail="x"), Reject(code="wrong_fleet", detail="x"))
TASKS = Tasks.of([({"level": 3, "map": [1, "x", None]}, 2.0), {"epsilon": spread(0.4, 0.1)}], (1, 1), group=4)
KEPT = KeptTasks(epoch=1, teacher="digest", tasks=TASKS)


class Schedule:
    """One teacher and its broker, which lies before each answer."""

    def __init__(self, seed: int, said: Counter[str]) -> None:
        self._mutator, self._said = Mutator(seed, "teacher"), said
        self._is_to_end = self._mutator.random.random() < 0.1
        self._heard: list[int] = []

    def play(self) -> None:
        """Publish all tasks, or end with the error that the broker meant."""
        with LyingBroker(self._answer) as broker:
            try:
                with TaskPublisher(broker.endpoint, connect_timeout_s=DEADLINE_S) as teacher:
                    for number in range(1, PUBLISHED + 1):
                        assert teacher.publish({"level": number}) == (1, number)
            except HeadraceError as error:
                if not self._is_to_end:
                    raise
                self._said[f"then {type(error).__name__}"] += 1
                return
        assert list(dict.fromkeys(self._heard)) == list(range(1, PUBLISHED + 1)), self._heard

    def _answer(self, kind: MessageKind, header: dict[str, Any], frames: list[bytes]) -> Iterator[Frames]:
        yield from self._lies()
        if kind is MessageKind.HELLO:
            yield TasksAck(version=(1, 0)).frames()
        elif kind is MessageKind.TASKS:
            self._heard.append(header["tasks"][0]["values"]["level"])
            yield TasksAck(version=header["version"]).frames()

    def _lies(self) -> Iterator[Frames]:
        rng = self._mutator.random
        truth = (TasksAck(version=(0, 9)), Reject(code="later", detail="x", fatal=False))
        for _ in range(LIES):
            message = rng.choice(truth)
            frames = self._mutator.message(message.frames())
            if not _is_knowledge(frames):
                self._said[f"to a teacher: {type(message).__name__}"] += 1
                yield frames
        if self._is_to_end and self._heard:
            yield rng.choice(_LAST).frames()


def _is_knowledge(frames: Frames) -> bool:
    """Return whether only the broker could tell the lie from the truth, or it ends the teacher."""
    kind, header, why = peek(frames)
    if kind is MessageKind.TASKS_ACK:
        with uncounted(), suppress(DecodeError):
            return read(TasksAck, header).version >= (1, 0)
    is_last = kind is MessageKind.FENCED or (kind is MessageKind.REJECT and header.get("fatal", True) is True)
    return is_last or why == "version_mismatch"


def open_board(path: Path, in_redis: bytes = b"") -> tuple[BrokerCore, TaskBoard]:
    """Return a broker's core and its board, of the file at `path` and what Redis has."""
    core, reports = BrokerCore(FLEET, BrokerLimits(), BrokerState()), SimpleNamespace(tasks={}, saved_tasks=in_redis)
    board = TaskBoard(core, path, reports)  # type: ignore[arg-type]
    core.observers.append(board)
    return core, board


def teach(core: BrokerCore, token: str) -> Tasks:
    """Publish as an honest teacher whom the broker does not know. Return what it keeps then."""

    def ask(message: Message) -> TasksAck:
        core.outbox.take()
        core.receive(token.encode(), message, 1.0)
        (answer,) = (sent.content for sent in core.outbox.take() if sent.peer == token.encode())
        assert isinstance(answer, TasksAck), answer
        return answer

    epoch, seq = ask(TeacherHello(token=token)).version
    assert seq == 0
    told = TASKS.model_copy(update={"version": (epoch, 1)})
    assert ask(told).version == told.version
    return told


def _lie_to_board(mutator: Mutator, path: Path, said: Counter[str]) -> None:
    core, _ = open_board(path)
    truth: tuple[Message, ...] = (TeacherHello(token="liar"), TASKS, Tasks(version=(2, 1)))
    for number in range(LIES):
        message = mutator.random.choice(truth)
        frames = mutator.message(message.frames())
        said[f"to a board: {type(message).__name__}"] += 1
        with suppress(DecodeError):
            kind, header = decode_header(frames)
            heard = read_hello(header) if kind is MessageKind.HELLO else read(Tasks, header)
            if isinstance(heard, TeacherHello | Tasks):
                core.receive(b"liar %d" % (number % 7), heard, 1.0)
    told = teach(core, "honest")
    again, _ = open_board(path)
    assert KeptTasks.model_validate_json(path.read_bytes()).tasks == told, "the file has them"
    assert teach(again, "another").version[0] > told.version[0]


@contextmanager
def teacher() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the schedules of a seed."""
    with tempfile.TemporaryDirectory() as folder:

        def play(seed: int, said: Counter[str]) -> None:
            Schedule(seed, said).play()
            path = Path(folder, "tasks.json")
            path.unlink(missing_ok=True)
            _lie_to_board(Mutator(seed, "board"), path, said)

        yield play
