"""Control messages: each kind round trips, newer fields are ignored, and an error names the wrong field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from golden_samples import message_classes, sample_model
from pydantic import BaseModel, FailFast, ValidationError

from headrace.schemas.accounts.ledger import Discard, Drop, WorkerTotals
from headrace.schemas.basics.bounds import MOST_REASONS, Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.errors import (
    DecodeError,
    ExitCode,
    FencedError,
    refusal,
)
from headrace.schemas.frames.wire import DEFAULT_LIMITS, MessageKind, decode, decode_header, encode
from headrace.schemas.messages import (
    HELLO_BY_ROLE,
    Ack,
    Heartbeat,
    LearnerHello,
    Message,
    WorkerHello,
    messages_to,
    read,
    read_hello,
)
from headrace.schemas.messages.message_base import Receiver

KINDS = sorted(message_classes(), key=lambda cls: cls.__name__)


def test_each_kind_except_batch_has_a_message_class() -> None:
    assert {cls.KIND for cls in KINDS} == set(MessageKind) - {MessageKind.BATCH}


RECEIVERS: tuple[Receiver, ...] = get_args(Receiver)
FLEET_MESSAGES = [
    cls for cls in KINDS if cls.__module__.rpartition(".")[2] in ("message_base", "learner_messages", "worker_messages")
]


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_a_receiver_takes_one_message_of_each_kind(receiver: Receiver) -> None:
    taken = [cls for cls in KINDS if receiver in cls.TO]
    assert messages_to(receiver) == {cls.KIND: cls for cls in taken}
    assert len({cls.KIND for cls in taken}) == len(taken) > 0


@pytest.mark.parametrize("cls", FLEET_MESSAGES, ids=lambda cls: cls.__name__)
def test_each_message_of_the_fleet_but_a_hello_has_a_receiver(cls: type[Message]) -> None:
    assert bool(cls.TO) is (cls.KIND is not MessageKind.HELLO)


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_a_message_arrives_as_it_was_sent(cls: type[Message]) -> None:
    for seed in "abcdef":
        sent = sample_model(cls, seed)
        received = decode(sent.frames())
        assert received.kind is cls.KIND
        assert read(cls, received.header) == sent


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_fields_of_a_newer_version_are_ignored(cls: type[Message]) -> None:
    sent = sample_model(cls)
    assert read(cls, {**decode(sent.frames()).header, "added_later": [1, {"x": None}]}) == sent


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_a_field_of_the_wrong_type_is_named(cls: type[Message]) -> None:
    header = decode(sample_model(cls).frames()).header
    for name, field in cls.model_fields.items():
        with pytest.raises(DecodeError, match=rf"bad_message: {cls.__name__}: {name}"):
            read(cls, {**header, name: [None]})
        if field.is_required():
            with pytest.raises(DecodeError, match=f"{name}: Field required"):
                read(cls, {k: v for k, v in header.items() if k != name})


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"slot": True}, "slot"),
        ({"slot": 1.0}, "slot"),
        ({"slot": "1"}, "slot"),
        ({"slot": -1}, "slot"),
        ({"slot": 2**63}, "slot"),
        ({"incarnation": 0}, "incarnation"),
        ({"totals": {"stepped": -1}}, "totals.stepped"),
        ({"totals": {"discarded": {"env_hang": 2**64 - 1}}}, "totals.discarded.env_hang"),
        ({"totals": {"dropped": {"stale": [1]}}}, "totals.dropped.stale"),
        ({"totals": {"dropped": {"stale": [1, -2]}}}, "totals.dropped.stale"),
        ({"weights": [1]}, "weights"),
        ({"weights": [1, None]}, "weights"),
        ({"totals": {"discarded": {f"{i}": 1 for i in range(MOST_REASONS + 1)}}}, "totals.discarded"),
        ({"totals": {"dropped": {f"{i}": (1, 1) for i in range(MOST_REASONS + 1)}}}, "totals.dropped"),
        ({"totals": {"discarded": {"x" * 101: 1}}}, "totals.discarded"),
        ({"totals": {"module_steps": {f"{i}": 1 for i in range(1025)}}}, "totals.module_steps"),
        ({"blocked": "x" * 101}, "blocked"),
    ],
)
def test_values_out_of_range_or_of_a_wrong_type_are_refused(changes: dict[str, Any], where: str) -> None:
    header = Heartbeat(slot=0, incarnation=1, totals=WorkerTotals()).model_dump() | changes
    with pytest.raises(DecodeError) as caught:
        read(Heartbeat, header)
    assert caught.value.detail.startswith(f"Heartbeat: {where}")


@pytest.mark.parametrize("cls", FLEET_MESSAGES, ids=lambda cls: cls.__name__)
def test_ids_and_reasons_of_any_length_are_refused(cls: type[Message]) -> None:
    sent = sample_model(cls).model_dump()
    for name in {"token", "fleet_id", "reason", "blocked"} & cls.model_fields.keys():
        with pytest.raises(DecodeError, match=f"{cls.__name__}: {name}"):
            read(cls, sent | {name: "x" * 1001})


@pytest.mark.parametrize("told", ["0.1.0\n", "0.1/../x", "\x1b[31m", "1" * 65, 1, None])
def test_a_malformed_headrace_version_is_refused(told: Any) -> None:
    with pytest.raises(DecodeError, match="WorkerHello: headrace_version"):
        read(WorkerHello, {"fleet_id": "f", "token": "t", "headrace_version": told})


def test_each_role_has_its_own_hello_and_an_unknown_role_is_refused() -> None:
    for role, cls in HELLO_BY_ROLE.items():
        sent = sample_model(cls)
        assert type(read_hello(decode(sent.frames()).header)) is cls
        assert sent.model_dump()["role"] == role
    for role in (None, "admin", [], 7):
        with pytest.raises(DecodeError, match="HELLO of unknown role"):
            read_hello({"role": role})
    with pytest.raises(DecodeError, match="env hosts come to a worker's"):
        read_hello({"role": "env-host"})


def test_held_batches_are_listed_by_slot_and_incarnation_only() -> None:
    header = sample_model(LearnerHello).model_dump()
    for key in ("1", "1/", "a/b", "1/2/3", "-1/2", "1/" + "9" * 40):
        with pytest.raises(DecodeError, match="held"):
            read(LearnerHello, header | {"held": {key: []}})


def test_reasons_may_be_given_as_their_enums() -> None:
    totals = WorkerTotals(discarded={Discard.RESET: 3}, dropped={Drop.STALE: (4, 1)})
    hello = WorkerHello(fleet_id="f", token="t", totals=totals)
    assert read(WorkerHello, decode(hello.frames()).header) == hello


def test_a_message_cannot_be_changed_once_it_is_made() -> None:
    with pytest.raises(Exception, match="frozen"):
        Ack().credit = 3  # type: ignore[misc]


def test_weights_versions_are_ordered_as_pairs() -> None:
    versions: list[Version] = [(1, 9), (2, 0), (1, 10)]
    assert sorted(versions) == [(1, 9), (1, 10), (2, 0)]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("wrong_fleet", ExitCode.WRONG_FLEET),
        ("version_mismatch", ExitCode.VERSION_MISMATCH),
        ("fenced", ExitCode.FENCED),
        ("key_revoked", ExitCode.KEYS),
        ("something_new", ExitCode.PROTOCOL),
    ],
)
def test_a_refusal_becomes_an_error_with_its_exit_code(code: str, exit_code: ExitCode) -> None:
    error = refusal(code, "why")
    assert (error.code, str(error), error.exit_code) == (code, "why", exit_code)
    assert isinstance(error, FencedError) is (code == "fenced")


# -- bounds -----------------------------------------------------------------------------------------------------------

BOUNDED_BY_THE_MESSAGE = {
    "Ack": "waiting_for",
    "AgentsStep": "reward info terminated truncated",
    "BatchHeader": "weights_digest agents modules reasons episodes agent_returns agent_lengths aborted frozen_agents "
    "tasks task_of ended_by_task",
    "Bye": "window counters",
    "ChunkShipment": "discarded untrained episodes",
    "ClientPart": "frame_sizes",
    "ClientReject": "error message facts",
    "ClientWelcome": "spaces episodes",
    "Commit": "position",
    "EnvAnswers": "answers stepped ended also_truncated began built infos failures outside",
    "EnvHeartbeat": "under_way",
    "EnvHostBye": "reason",
    "EnvHostHello": "spaces env host",
    "EnvOrders": "orders tasks",
    "EpisodeAnswer": "task",
    "EpisodeStep": "reward info",
    "Fenced": "detail",
    "GroupHello": "position held host",
    "Heartbeat": "counters",
    "LearnerHello": "position held host",
    "LearnerRow": "values",
    "LearnerWelcome": "spaces",
    "LoggedMetric": "value",
    "Obituary": "window",
    "OpenEpisodes": "agents modules columns rows tasks",
    "Reject": "code detail",
    "Status": "spaces waiting_for",
    "WeightedTask": "values",
    "WeightsHeader": "digest",
    "WeightsPart": "frame_sizes",
    "WorkerHello": "host spaces",
    "WorkerWelcome": "weights_endpoint counters",
}
"""Fields with a text, a fraction, a list or a map that has no bound but the size of its message. None is an int."""

MODELS: dict[str, type[BaseModel]] = {}


def note_models(annotation: Any) -> None:
    """Add the models in a type to `MODELS`, and those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation.__name__ not in MODELS:
        MODELS[annotation.__name__] = annotation
        for field in annotation.model_fields.values():
            note_models(field.annotation)
    for part in get_args(annotation):
        note_models(part)


for kind in (*KINDS, BatchHeader):
    note_models(kind)


def unbounded(annotation: Any, metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield the parts of a type that have no bound: int, float, str, list, dict and Any."""
    origin, args = get_origin(annotation), get_args(annotation)
    bounds = {
        name
        for part in metadata
        for inner in getattr(part, "metadata", [part])
        for name in ("le", "lt", "max_length", "pattern")
        if getattr(inner, name, None) is not None
    }
    if origin is Annotated:
        yield from unbounded(args[0], [*metadata, *args[1:]])
    elif origin in (Union, UnionType):
        for arg in args:
            yield from unbounded(arg, metadata)
    elif origin in (list, dict, tuple):
        if origin is not tuple and "max_length" not in bounds:
            yield origin
        for arg in args:
            yield from unbounded(arg, ())
    elif annotation in (int, float, str, Any, list, dict) and not bounds and origin is not Literal:
        yield annotation


@pytest.mark.parametrize("name", sorted(MODELS))
def test_each_number_text_list_and_map_of_a_message_has_a_bound(name: str) -> None:
    found = {field: set(unbounded(it.annotation, it.metadata)) for field, it in MODELS[name].model_fields.items()}
    assert {field for field, parts in found.items() if parts} == set(BOUNDED_BY_THE_MESSAGE.get(name, "").split())
    assert not any(int in parts for parts in found.values())


def patient(annotation: Any, metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield the lists in a type whose check goes on after a wrong item."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from patient(args[0], [*metadata, *args[1:]])
        return
    if origin is list and not any(isinstance(part, FailFast) for part in metadata):
        yield annotation
    for arg in args:
        yield from patient(arg, ())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_each_list_of_a_message_is_refused_at_its_first_wrong_item(name: str) -> None:
    found = [each for it in MODELS[name].model_fields.values() for each in patient(it.annotation, it.metadata)]
    assert found == [], "write ListOf[...], or half a million wrong items take seconds and 800 MiB"


def test_many_wrong_items_of_a_list_make_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        LearnerHello.model_validate(
            {"token": "t", "channel": "stream", "position": [0] * 1000, "held": {"1/1": [0, 0]}}
        )
    assert caught.value.error_count() == 2


def test_an_object_of_too_many_names_is_refused_before_its_values_are_read() -> None:
    wide = {str(number): 0 for number in range(DEFAULT_LIMITS.names + 1)}
    for header in (wide, {"metrics": wide}, {"list": [[wide]]}):
        with pytest.raises(DecodeError, match=f"an object of {len(wide)} names; {DEFAULT_LIMITS.names} are allowed"):
            decode_header(encode(MessageKind.HEARTBEAT, header))
    del wide["0"]
    assert decode_header(encode(MessageKind.HEARTBEAT, {"metrics": wide}))[1] == {"metrics": wide}


def test_a_header_may_be_nested_to_its_limit_and_no_deeper() -> None:
    deepest: Any = 0
    for _ in range(DEFAULT_LIMITS.header_depth - 1):
        deepest = [deepest]
    assert decode_header(encode(MessageKind.HEARTBEAT, {"x": deepest}))[1] == {"x": deepest}
    with pytest.raises(DecodeError, match="nested deeper"):
        decode_header(encode(MessageKind.HEARTBEAT, {"x": [deepest]}))
