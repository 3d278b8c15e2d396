"""`headrace report`: writes all facts about a run into one HTML file, and its curves into other files."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import orjson

from headrace.deploy.annexes.watch.report.report_page import report_html
from headrace.deploy.annexes.watch.report.run_report import read_run, rows_of, series_of
from headrace.deploy.report.run_rows import COLUMNS
from headrace.deploy.terminal.std_streams import ignore_closed_reader, say
from headrace.schemas.basics.run_files import replace_private
from headrace.schemas.errors import writing

REPORT = "report.html"
_STDOUT = Path("-")


def write_report(run_dir: Path, out: Path | None, table: Path | None, json: Path | None) -> None:
    """Write the report of the run, by default beside its files; its rows as CSV; its facts and curves as JSON.

    Raises `RunDirError` where there is no run, or a file cannot be written.
    """
    facts, series = read_run(run_dir)
    written = [(out or run_dir / REPORT, report_html(facts, series).encode())]
    if table is not None:
        written.append((table, _csv(run_dir)))
    if json is not None:
        document = {**facts, "series": series_of(series)}
        written.append((json, orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)))
    for path, content in written:
        _write(path, content)


def _csv(run_dir: Path) -> bytes:
    columns = dict.fromkeys(COLUMNS)
    for row in rows_of(run_dir):
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows_of(run_dir))
    return text.getvalue().encode()


def _write(path: Path, content: bytes) -> None:
    if path == _STDOUT:
        with ignore_closed_reader(sys.stdout):
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        return
    with writing(path):
        replace_private(path, content)
    say(f"written: {path}", sys.stderr)
