"""README and quickstart show the figures of one run of `make run`, which `docs/_ext/first_run.py` writes."""

from __future__ import annotations

import re

from first_run import PAGES, command, fill, rows


def test_readme_and_quickstart_show_the_figures_of_one_run() -> None:
    readme, quickstart = (rows(page.read_text()) for page in PAGES)
    assert {"goal", "time", "env steps", "mean return"} <= readme.keys() <= quickstart.keys()
    assert {label: quickstart[label] for label in readme} == readme
    [steps] = re.findall(r"[\d,]+(?= \()", readme["env steps"])
    assert f" {steps} " in quickstart["stepped"]
    rates = {rate for page in PAGES for rate in re.findall(r"[1-9][\d,]*/s", page.read_text())}
    assert rates == set(re.findall(r"[\d,]+/s", readme["env steps"]))


def test_the_figures_are_those_of_make_run() -> None:
    assert command()[:2] == ["headrace", "up"]
    assert "475" in command()
    printed = "┌──┐\n│ env steps │ 1,024 (512/s) │\n│ restarts  │ none          │\n└──┘\n"
    page = "```text\n│ env steps   │ 7 (1/s)  │\n...\n```\n"
    assert fill(page, rows(printed)) == "```text\n│ env steps │ 1,024 (512/s) │\n...\n```\n"
