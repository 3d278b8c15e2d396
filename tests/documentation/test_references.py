"""Pages list the settings, commands, reasons, events, Redis keys and paths that the code has, and no others."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
from command_reference import commands, commands_as_markdown
from documentation.blocks import blocks_of, written
from exit_codes import exit_codes_as_markdown
from generated_pages import PARTS, PLACE, fill
from redis_reference import redis_keys_as_markdown
from settings_reference import settings, settings_as_markdown
from typer.main import get_command

from headrace.deploy.annexes.programs import RunningFleet, fleet
from headrace.deploy.command.cli import app
from headrace.deploy.monitoring.finding_kinds import KINDS
from headrace.deploy.report.run_rows import COLUMNS
from headrace.schemas.accounts.figures import GAUGE_TABLE
from headrace.schemas.accounts.ledger import Discard, Drop
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.redis_keys import TABLE
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import known_keys
from headrace.workers.callbacks import EVENTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
ROOMS = ("schemas", "workers", "broker", "learner_stub", "deploy", "tests", "docs")
_PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def test_the_configuration_page_has_every_setting_with_its_meaning_default_and_variable() -> None:
    rows = [row for section in FleetConfig.model_fields for row in settings(section)]
    assert [row.key for row in rows] == list(known_keys())
    assert [row.key for row in rows if len(row.meaning.split()) < 2] == []
    page = settings_as_markdown()
    assert [row.key for row in rows if f"`{row.key}` (" not in page or f"`{row.variable}`" not in page] == []
    lease = next(row for row in rows if row.key == "broker.lease_s")
    assert (lease.type, lease.default, lease.unit) == ("number, > 0 and ≤ 86400", "`10.0`", "s")
    assert lease.variable == "HEADRACE_BROKER__LEASE_S"


def test_the_commands_page_has_every_command_with_its_options_and_examples() -> None:
    page = commands_as_markdown()
    names = [name for name, _ in commands(get_command(app))]
    assert {"headrace up", "headrace keys init", "headrace env-host"} <= set(names)
    for name, command in commands(get_command(app)):
        section = page.split(f"## {name}\n")[1].split("\n## ")[0]
        names_of = [parameter.opts[0] for parameter in command.params]
        options = [name if name.startswith("-") else name.upper() for name in names_of]
        assert [option for option in options if option not in section] == [], name
        assert f"```sh\n{name.split()[0]} " in section, name


def test_the_table_of_exit_codes_has_every_code() -> None:
    table = exit_codes_as_markdown()
    assert [code.name for code in ExitCode if f"| {int(code)} | `{code.name}` |" not in table] == []
    assert "`FencedError`" in table


def test_the_page_of_exit_codes_says_what_each_code_means() -> None:
    told = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \|$", read("guides/exit-codes.md"), re.M)
    assert told == [(str(int(code)), code.name) for code in ExitCode]


def test_the_page_of_findings_has_each_kind_with_its_severity_time_limit_and_remedy() -> None:
    rows = re.findall(r"^\| `(\w+)` \((\w+)\) \| (.+) \| (.+) \|(.*)\| (.+) \|$", read("guides/why.md"), re.M)
    told = [
        (name, severity, after, limit.strip(" `"), do.replace("`", "")) for name, severity, _, after, limit, do in rows
    ]
    after = {kind.name: f"{kind.after_s:g} s" if kind.after_s else "at once" for kind in KINDS}
    assert told == [(kind.name, kind.severity, after[kind.name], kind.limit, kind.remedy) for kind in KINDS]


def test_fill_makes_the_generated_parts_of_a_page_anew() -> None:
    page = "before\n<!-- generated: {} -->\nstale\n<!-- end of generated -->\nafter"
    filled = fill(page.format("exit codes"))
    assert "`CRASH_LOOP`" in filled
    assert "stale" not in filled
    with pytest.raises(KeyError):
        fill(page.format("nothing that there is"))


def test_the_generated_parts_of_the_pages_are_what_the_code_says() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    places = [what for text in texts.values() for what in re.findall(r"^<!-- generated: (.+) -->$", text, re.MULTILINE)]
    assert set(places) == PARTS.keys()
    assert sum(len(PLACE.findall(text)) for text in texts.values()) == len(places)
    stale = [name for name, text in texts.items() if fill(text) != text]
    assert stale == [], "`make docs` writes them anew; commit what it changes"


def test_every_reason_of_the_ledger_is_explained() -> None:
    page = read("guides/what-is-lost.md")
    reasons = {reason.value for reason in (*Discard, *Drop)} - {Drop.OTHER.value}
    assert [reason for reason in reasons if f"| `{reason}` |" not in page] == []


def test_every_event_of_callbacks_is_listed() -> None:
    page = read("guides/callbacks-metrics-state.md")
    rows = {event: f"| `{event}` |" for event in EVENTS}
    assert [event for event, row in rows.items() if row not in page] == []
    listed = dict(re.findall(r"^\| `(on_\w+)` \|.*\| (.*) \|$", page, re.M))
    assert {name: tuple(re.findall(r"`(\w+)`", given)) for name, given in listed.items()} == EVENTS


def test_the_guide_names_all_arguments_of_a_fleet_in_a_program_and_all_that_it_offers() -> None:
    page = read("guides/learner.md").partition("## In one program\n")[2].partition("\n## ")[0]
    offered = {name for name in vars(RunningFleet) if not name.startswith("_")} | {"path", "summary"}
    named = set(re.findall(r"`(\w+)(?:\((?:\.\.\.)?\))?`", page))
    arguments = signature(fleet).parameters.keys() - {"unknown"}
    assert named == {*arguments, *offered, "run", "EpisodeStream", "WeightPublisher", "TaskPublisher"}


def test_every_column_of_a_runs_rows_is_explained() -> None:
    page = read("guides/curves.md")
    assert [column for column in COLUMNS if f"`{column}`" not in page] == []


def test_the_redis_page_has_every_key_counter_and_gauge() -> None:
    page = redis_keys_as_markdown()
    assert [key.name for key in TABLE if f"## {key.name}\n" not in page or key.meaning[1:] not in page] == []
    assert [key.name for key in TABLE if not key.example] == []
    assert [metric.name for metric in (*COUNTER_TABLE, *GAUGE_TABLE) if f"| `{metric.name}" not in page] == []


def test_learners_on_the_pages_find_the_broker_by_its_run_directory() -> None:
    """No reader has to open the broker's file: `EpisodeStream.of` and `WeightPublisher.of` do."""
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]
    assert any('.of("runs/mine")' in block.text for block in blocks)
    assert [f"{block.page.name}:{block.line}" for block in blocks if "broker.json" in block.text] == []


def paths() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for path in _PATH.findall(page.read_text(encoding="utf-8")):
            yield str(page.relative_to(ROOT)), path.rstrip(".")


def test_every_path_that_a_page_names_exists() -> None:
    assert len(list(paths())) > 50
    assert [(page, path) for page, path in paths() if not (ROOT / path).exists() and path != "docs/_build/html"] == []


def slug(heading: str) -> str:
    """Return the anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {*map(slug, headings), *re.findall(r'id="([^"]+)"', text), *re.findall(r"^\((.+)\)=$", text, re.MULTILINE)}


def test_every_relative_link_of_the_pages_has_a_target() -> None:
    """Sphinx checks the links of `docs/` too, but only `make docs` runs it."""
    links = [
        (page, *target.partition("#")[::2]) for page in PAGES for target in re.findall(r"\]\(([^):]+)\)", written(page))
    ]
    assert len(links) > 200
    targets = [(page, (page.parent / file).resolve() if file else page, anchor) for page, file, anchor in links]
    assert [(page.name, str(file)) for page, file, _ in targets if not file.exists()] == []
    missing = [
        (page.name, file.name, anchor) for page, file, anchor in targets if anchor and anchor not in anchors(file)
    ]
    assert missing == []


@pytest.mark.parametrize("picture", sorted(path.name for path in (DOCS / "images").glob("*.svg")))
def test_a_picture_has_a_title_and_colours_for_light_and_dark(picture: str) -> None:
    text = (DOCS / "images" / picture).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    # Pictures stand in one HTML page: names of classes and ids are each one's own.
    prefix = picture.split("-")[0].removesuffix(".svg")
    names = re.findall(r'(?:class|id)="([\w-]+)"', text)
    assert [name for name in names if not name.startswith(prefix)] == []
