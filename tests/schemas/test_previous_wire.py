"""Messages stay compatible with peers of the previous minor version of the wire.

Both ways: today's code reads what such a peer sends, and such a peer reads what today's code sends.
"""

from __future__ import annotations

from typing import Any

import golden_samples
import golden_wire
import orjson
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.frames.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, decode, read_tag
from headrace.schemas.messages import read
from support.decode_batch import decode_batch

PREVIOUS = golden_wire.folder_of(PROTOCOL_MAJOR, PROTOCOL_MINOR - 1)
MODELS: dict[str, type[BaseModel]] = {
    **{cls.__name__: cls for cls in golden_samples.message_classes()},
    "BatchHeader": BatchHeader,
}
RECORDED = sorted(path.stem for path in PREVIOUS.glob("*.bin"))
READERS: dict[str, Any] = orjson.loads((PREVIOUS / "readers.json").read_bytes())["$defs"]


def _as_json(model: BaseModel) -> Any:
    return orjson.loads(model.model_dump_json())


def test_the_recording_of_the_previous_version_is_complete() -> None:
    assert {name for name in RECORDED if not name.startswith("batch_")} == {
        name for name in READERS if name in MODELS and name != "BatchHeader"
    }
    assert {f"batch_{family}" for family in golden_samples.SPACES} <= set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_todays_code_reads_every_field_of_a_message_of_the_previous_version(name: str) -> None:
    """This test fails if a new field has no default, or if an old one is gone, renamed or of another form."""
    frames = golden_samples.read(PREVIOUS / f"{name}.bin")
    assert read_tag(frames[0])[1:3] == (PROTOCOL_MAJOR, PROTOCOL_MINOR - 1)
    message = decode(frames)
    if name.startswith("batch_"):
        family = name.removeprefix("batch_")
        header, batch = decode_batch(frames, *golden_samples.SPACES.get(family, golden_samples.SPACES["box"]))
        assert len(batch) == header.chunks
        taken = _as_json(header)
    else:
        assert name in MODELS, f"{name} is gone; a message of the previous version stays readable"
        taken = _as_json(read(MODELS[name], message.header))
    said = {key: value for key, value in message.header.items() if key != "payload"}
    assert golden_samples.contains(taken, said)


@pytest.mark.parametrize("name", sorted(READERS.keys() & MODELS.keys()))
def test_a_reader_of_the_previous_version_accepts_todays_messages(name: str) -> None:
    """This test fails if a field is gone, renamed, of another form, or has values that the old reader refuses."""
    reader, model = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": READERS}), MODELS[name]
    full = [golden_samples.sample_model(model, seed) for seed in "abcdef"]
    required = {key: value for key, value in full[0] if model.model_fields[key].is_required()}
    for sent in (*full, model.model_validate(required)):
        wrong = [f"{error.json_path}: {error.message}" for error in reader.iter_errors(_as_json(sent))]
        assert not wrong, f"{name} cannot be read by a peer of {PREVIOUS.name}"


def test_every_model_on_the_wire_ignores_fields_that_it_does_not_know() -> None:
    """The next minor version may add fields."""
    seen: set[type[BaseModel]] = set()
    for model in MODELS.values():
        _walk(model, seen)
    assert len(seen) > len(MODELS)
    assert {model.__name__ for model in seen if model.model_config.get("extra") not in ("ignore", None)} == set()


def _walk(annotation: Any, seen: set[type[BaseModel]]) -> None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
        seen.add(annotation)
        for field in annotation.model_fields.values():
            _walk(field.annotation, seen)
    for part in getattr(annotation, "__args__", ()):
        _walk(part, seen)
