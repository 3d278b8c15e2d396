"""Log lines: JSON where a machine reads them, readable on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from headrace.deploy.terminal import logs
from headrace.deploy.terminal.logs import (
    Identity,
    LogFormat,
    Output,
    Readable,
    RepeatedWarnings,
    message_of,
    set_up_logging,
)


@pytest.fixture(autouse=True)
def handlers_go_away() -> Iterator[None]:
    logger = logging.getLogger("headrace")
    before = (logger.level, logger.propagate, logger.handlers[:])
    yield
    for handler in logger.handlers:
        handler.close()
    logger.level, logger.propagate, logger.handlers = before


def test_a_json_line_has_the_fleet_role_slot_and_extra_fields(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_chosen", Output(log_format=LogFormat.JSON))
    set_up_logging(Identity("f", "worker", 2, 5), file=tmp_path / "log")
    logging.getLogger("headrace.worker").warning("env %d failed", 3, extra={"env_index": 3, "path": tmp_path})
    line = capsys.readouterr().err
    assert line == (tmp_path / "log").read_text()
    found = orjson.loads(line)
    assert (found["fleet"], found["role"], found["slot"], found["incarnation"]) == ("f", "worker", 2, 5)
    assert (found["level"], found["message"], found["env_index"]) == ("warning", "env 3 failed", 3)
    assert message_of(line) == "env 3 failed"
    assert [message_of(other) for other in ("", "{", "7", "{}", "ValueError: odd")] == [
        "",
        "{",
        "7",
        "{}",
        "ValueError: odd",
    ]


def test_an_exception_is_part_of_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_chosen", Output(log_format=LogFormat.JSON))
    set_up_logging(Identity("f", "broker"))
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("headrace.x").exception("it\nbroke")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: odd" in orjson.loads(line)["traceback"]


def test_a_readable_line_is_short() -> None:
    record = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": "slow", "created": 0.0})
    assert Readable(Identity("f", "worker", 2, 5)).format(record).endswith(" worker 2.5 WARNING slow")
    assert Readable(Identity("f", "broker")).format(record).endswith(" broker WARNING slow")


@pytest.mark.parametrize(("chosen", "seen"), [(Output(), 2), (Output(verbose=True), 3), (Output(quiet=True), 1)])
def test_verbose_logs_more_and_quiet_logs_less_on_the_terminal(
    chosen: Output, seen: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The log file also has the lines that a quiet terminal does not show."""
    monkeypatch.setattr(logs, "_chosen", chosen)
    set_up_logging(Identity("f", "broker"), file=tmp_path / "log")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger("headrace.x").log(level, "detail")
    assert capsys.readouterr().err.count("detail") == seen
    assert (tmp_path / "log").read_text().count("detail") == max(seen, 2)


def test_a_storm_of_warnings_is_ten_lines_and_a_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]
    monkeypatch.setattr(logs, "RepeatedWarnings", lambda: RepeatedWarnings(lambda: now[0]))
    set_up_logging(Identity("f", "worker"), file=tmp_path / "log")
    log = logging.getLogger("headrace.worker")

    def storm(count: int) -> list[str]:
        for number in range(count):
            log.error("env %d failed (%s)", number % 64, "diverged")
            log.info("episode %d", number)
        log.warning("%s", "another thing")
        return capsys.readouterr().err.splitlines()

    first = storm(1000)
    failed = [line for line in first if "failed" in line]
    assert len(failed) == 10
    assert failed[-1].endswith("env 9 failed (diverged) (more like it are left out for up to 10 s)")
    assert sum("episode" in line for line in first) == 1000
    now[0] += 10.0
    second = storm(2)
    assert [line.partition(" ERROR ")[2] for line in second if "failed" in line] == [
        "env 0 failed (diverged) (990 like it were left out)",
        "env 1 failed (diverged)",
    ]
    for number in range(100):
        log.warning("%s: %s", f"peer {number}", "refused")
    assert len(capsys.readouterr().err.splitlines()) == 100, "the words are another's"
    assert (tmp_path / "log").read_text().count("failed") == 1002, "the file has all"
