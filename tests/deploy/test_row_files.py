"""The file of a run's rows stays readable: through torn lines, and on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.loggers.row_files import FileLogger, JsonlFile

FULL_DISK = """
import logging, resource, signal, sys
from pathlib import Path
from headrace.deploy.loggers.row_files import FileLogger, JsonlFile

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
path = folder / "m.jsonl"
logger = FileLogger(JsonlFile(path))

def log(n):
    logger.log({"n": n, "padding": "x" * 50}, n)

log(0)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, unlimited[1]))  # as a full disk: write() writes a part, then fails
for n in range(1, 20):
    log(n)
assert path.read_bytes().endswith(b"\\n"), "half a row was left"
assert path.stat().st_size <= 200
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
log(20)
logger.close()
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_full_disk_only_delays_rows_and_is_reported_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["n"] for row in lines(tmp_path / "m.jsonl")] == list(range(21))
    said = [line for line in done.stdout.splitlines() if "m.jsonl" in line]
    assert len(said) == 2
    assert "cannot be written (File too large)" in said[0]
    assert "is written again" in said[1]


@pytest.mark.parametrize("torn", [b'{"n": 3, "a', b'{"n": 3}'])
def test_a_torn_last_line_is_cut_off_before_the_next_row(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n' + torn)
    JsonlFile(path).append([{"n": 4}])
    assert [row["n"] for row in lines(path)] == [1, 2, 4]


def test_a_path_that_cannot_be_written_is_reported_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m.jsonl").mkdir()
    logger = FileLogger(JsonlFile(tmp_path / "m.jsonl"))
    for n in range(3):
        logger.log({"n": n}, n)
    logger.close()
    assert caplog.text.count("cannot be written (Is a directory)") == 1
    assert "the last 3 rows could not be written" in caplog.text
