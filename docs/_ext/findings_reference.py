"""The table of findings, from the table in the code."""

from __future__ import annotations

from headrace.deploy.monitoring.finding_kinds import KINDS, FindingKind


def findings_as_markdown() -> str:
    """Return a table: kind, meaning, limit, what to do."""
    head = [
        "| kind | what it means | after | limit | what to do |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_row, KINDS)])


def _row(kind: FindingKind) -> str:
    after = f"{kind.after_s:g} s" if kind.after_s else "at once"
    limit = f"`{kind.limit}`" if kind.limit else ""
    return f"| `{kind.name}` ({kind.severity}) | {kind.meaning} | {after} | {limit} | {kind.what_to_do} |"
