"""What a minor version of the wire says and takes, recorded from its own code.

    python tests/golden/golden_wire.py

writes the folder `wire_MAJOR_MINOR` of the version that the code speaks, and nothing if it is there. Run it before the
minor version is raised: the record is of the version that is then the previous one. Its three parts:

- NAME.bin: a sample of each message, with all fields of that version
- readers.json: the JSON Schema of each message, which is what a reader of that version takes
- fleet.tape: what a worker, a learner and their broker said to each other, from HELLO to the closed books
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from golden_samples import golden, message_classes, write
from pydantic.json_schema import models_json_schema

from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.frames.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR

FOLDER = Path(__file__).parent
BATCHES, SEED = 3, 5
"""Batches in the tape, and the seed of their made-up episodes."""
_PROSE = ("title", "description")


def folder_of(major: int, minor: int) -> Path:
    """The record of a version."""
    return FOLDER / f"wire_{major}_{minor}"


def readers() -> dict[str, Any]:
    """The JSON Schema of all messages together: `$defs` has one for each, by the name of its class."""
    models = [(cls, "validation") for cls in (*message_classes(), BatchHeader)]
    _, schema = models_json_schema(models, ref_template="#/$defs/{model}")  # type: ignore[arg-type]
    found: dict[str, Any] = _without_prose(schema)
    return found


def _without_prose(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key not in _PROSE or not isinstance(value, str)}
        return {key: _without_prose(value) for key, value in kept.items()}
    return [_without_prose(value) for value in schema] if isinstance(schema, list) else schema


def record_tape(path: Path) -> None:
    """Run a small fleet of today's code, and write what it said."""
    from headrace.learner_stub import EpisodeStream, WeightPublisher
    from headrace.workers.fleet.session import SessionState
    from support.pipeline.delivery import BrokerThread, Envs, Feeder, batches_of
    from support.pipeline.tape import Recorder, deaf, write_tape
    from support.waiting import wait_until

    with ExitStack() as stack:
        broker = stack.enter_context(BrokerThread(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        recorder = stack.enter_context(Recorder(broker.endpoints))
        stream = stack.enter_context(EpisodeStream(recorder.learner[1]))
        publisher = stack.enter_context(WeightPublisher(recorder.learner[1]))
        publisher.publish({"w": np.arange(4, dtype=np.float32)})
        wait_until(lambda: publisher.pump() or publisher.acknowledged == (1, 1), "the broker's weights")
        feeder = stack.enter_context(deaf(Feeder(recorder.worker[1], Envs(SEED).fragments(BATCHES))))
        for _ in batches_of(stream, feeder.all_settled):
            pass
        wait_until(lambda: feeder.weights.newest == (1, 1), "the worker's weights")
        feeder.leave()
        wait_until(lambda: feeder.session.state is SessionState.LEFT, "the worker's end")
        for _ in batches_of(stream, lambda: broker.rows()[0, 1].end_taken):
            pass
        entries = list(recorder.entries)
    write_tape(path, entries)


def record() -> None:
    """Write the record of today's version."""
    folder = folder_of(PROTOCOL_MAJOR, PROTOCOL_MINOR)
    if folder.exists():
        sys.exit(f"{folder.name} is recorded already, and peers of that version stay as they are")
    folder.mkdir()
    for name, frames in golden():
        write(folder / f"{name}.bin", frames)
    (folder / "readers.json").write_bytes(orjson.dumps(readers(), option=orjson.OPT_APPEND_NEWLINE))
    record_tape(folder / "fleet.tape")


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))  # for `support`
    record()
