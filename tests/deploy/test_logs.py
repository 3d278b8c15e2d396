"""Log lines: JSON where a machine reads them, readable on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from headrace.deploy.logs import Identity, Readable, set_up_logging


@pytest.fixture(autouse=True)
def handlers_go_away() -> Iterator[None]:
    logger = logging.getLogger("headrace")
    before = (logger.level, logger.propagate, logger.handlers[:])
    yield
    for handler in logger.handlers:
        handler.close()
    logger.level, logger.propagate, logger.handlers = before


def test_a_json_line_has_who_wrote_it_and_the_extra_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    set_up_logging(Identity("f", "worker", 2, 5), file=tmp_path / "log")
    logging.getLogger("headrace.worker").warning("env %d failed", 3, extra={"env_index": 3, "path": tmp_path})
    line = capsys.readouterr().err
    assert line == (tmp_path / "log").read_text()
    found = orjson.loads(line)
    assert (found["fleet"], found["role"], found["slot"], found["incarnation"]) == ("f", "worker", 2, 5)
    assert (found["level"], found["message"], found["env_index"]) == ("warning", "env 3 failed", 3)


def test_an_exception_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_debug_is_off_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for debug in (False, True):
        set_up_logging(Identity("f", "broker"), debug=debug)
        logging.getLogger("headrace.x").debug("detail")
    assert capsys.readouterr().err.count("detail") == 1
