"""The files of a run stay readable: through torn lines, new columns, a full disk, and names with commas."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.loggers.row_files import MOST_COLUMNS, CsvFile, FileLogger, JsonlFile

FULL_DISK = """
import logging, resource, signal, sys
from pathlib import Path
from headrace.deploy.loggers.row_files import CsvFile, FileLogger, JsonlFile

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
files = [JsonlFile(folder / "m.jsonl"), CsvFile(folder / "m.csv", ["n"])]
loggers = [FileLogger(file) for file in files]

def log(n):
    for logger in loggers:
        logger.log({"n": n, "padding": "x" * 50}, n)

def whole():
    return [(folder / name).read_bytes()[-1:] == b"\\n" for name in ("m.jsonl", "m.csv")]

log(0)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, unlimited[1]))  # as a full disk: write() writes a part, then fails
for n in range(1, 20):
    log(n)
assert all(whole()), "half a row was left"
assert all((folder / name).stat().st_size <= 200 for name in ("m.jsonl", "m.csv"))
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
log(20)
for logger in loggers:
    logger.close()
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_full_disk_only_delays_rows_and_is_reported_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["n"] for row in lines(tmp_path / "m.jsonl")] == list(range(21))
    assert [row["n"] for row in table(tmp_path / "m.csv")] == [str(n) for n in range(21)]
    for name in ("m.jsonl", "m.csv"):
        said = [line for line in done.stdout.splitlines() if name in line]
        assert len(said) == 2
        assert "cannot be written (File too large)" in said[0]
        assert "is written again" in said[1]


@pytest.mark.parametrize("torn", [b'{"n": 3, "a', b'{"n": 3}'])
def test_a_torn_last_line_is_cut_off_before_the_next_row(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n' + torn)
    JsonlFile(path).append([{"n": 4}])
    assert [row["n"] for row in lines(path)] == [1, 2, 4]


def test_new_columns_stand_at_the_right_end_and_earlier_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    first = CsvFile(path, ["kind", "n"])
    first.append([{"kind": "a", "n": 1}])
    first.append([{"n": 2, "loss, of policy": 0.1 + 0.2}, {"n": 3}])
    CsvFile(path, ["n", "kind", "other"]).append([{"n": 4, 'said "x"': -1.5}])
    assert path.read_text().splitlines()[0] == 'kind,n,"loss, of policy","said ""x"""'
    rows = table(path)
    assert [row["n"] for row in rows] == ["1", "2", "3", "4"]
    assert float(rows[1]["loss, of policy"]) == 0.1 + 0.2, "full precision"
    assert [row['said "x"'] for row in rows] == ["", "", "", "-1.5"]
    assert not list(tmp_path.glob(".*")), "a file was left aside"


def test_a_csv_file_has_a_limit_of_columns_and_reports_columns_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CsvFile(tmp_path / "m.csv", ["n"])
    for begin in (0, 700):
        file.append([{f"c{number}": 1 for number in range(begin, begin + 700)}])
    assert len(table(tmp_path / "m.csv")[0]) == MOST_COLUMNS
    assert caplog.text.count("is left out") == 1


def test_a_path_that_cannot_be_written_is_reported_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m.csv").mkdir()
    logger = FileLogger(CsvFile(tmp_path / "m.csv", ["n"]))
    for n in range(3):
        logger.log({"n": n}, n)
    logger.close()
    assert caplog.text.count("cannot be written (Is a directory)") == 1
    assert "the last 3 rows could not be written" in caplog.text


def test_a_csv_file_gets_missing_rows_from_the_json_file(tmp_path: Path) -> None:
    rows, table_of = JsonlFile(tmp_path / "m.jsonl"), CsvFile(tmp_path / "m.csv", ["n"])
    for n in range(3):
        rows.append([{"n": n, f"c{n}": n}])
        table_of.append([{"n": n, f"c{n}": n}])
    before = table_of.path.read_text()
    table_of.catch_up(rows)
    assert table_of.path.read_text() == before
    rows.append([{"n": 3, "late": "x"}])
    for content in (before, "", None):
        table_of.path.unlink() if content is None else table_of.path.write_text(content)
        CsvFile(tmp_path / "m.csv", ["n"]).catch_up(rows)
        assert [row["n"] for row in table(table_of.path)] == ["0", "1", "2", "3"]
        assert table(table_of.path)[3]["late"] == "x"
