"""Text of peers cannot fill a log, and cannot control a terminal."""

from __future__ import annotations

import io
import json
import logging

import pytest

from headrace.deploy.terminal.logs import Identity, Readable
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.counted_warnings import INTERVAL_S, MOST_KINDS, CountedWarnings
from headrace.schemas.basics.printable import printable
from headrace.schemas.credentials.tokens import digest_of, same_token


def test_a_repeated_warning_is_one_line_in_ten_seconds_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warnings = CountedWarnings(logging.getLogger("test.counted"), lambda: now)
    for _ in range(1000):
        warnings.warn(b"a", "bad", "bad message")
    warnings.warn(b"b", "bad", "bad message of b")
    warnings.warn(b"a", "worse", "worse message")
    assert caplog.messages == ["bad message", "bad message of b", "worse message"]
    now = INTERVAL_S
    warnings.warn(b"a", "bad", "bad message")
    assert caplog.messages[3:] == ["bad message (999 more like it since the last such line)"]
    for peer in range(10_000):
        warnings.warn(str(peer).encode(), "new", "a new peer")
    assert len(caplog.messages) == 4 + MOST_KINDS  # one kind is that of `a`, and all other peers share one line


def test_control_characters_of_peers_reach_no_terminal() -> None:
    hostile = "a\x1b[2J\x07\r\x9b1m\u202eb\tc\n\u00e9"
    assert printable(hostile) == "a\\x1b[2J\\x07\\r\\u009b1m\\u202eb\tc\n\u00e9"
    record = logging.makeLogRecord({"msg": "host %s", "args": (hostile,), "levelno": logging.INFO})
    said = io.StringIO()
    say(Readable(Identity("f", "broker")).format(record), said)
    assert "\x1b" not in said.getvalue()


def test_json_is_the_same_json_when_it_is_printed() -> None:
    told = {"host": "a\x1b[2J\x7f\x9b1m\u202e\u200fb\n"}
    assert json.loads(printable(json.dumps(told, ensure_ascii=False))) == told


def test_tokens_are_compared_whole_and_kept_as_digests() -> None:
    assert same_token("tök", "tök")
    assert not same_token("tök", "tok")
    assert not same_token("", "tok")
    assert "secret" not in digest_of("secret")
    assert digest_of("secret") == digest_of("secret") != digest_of("secret2")
