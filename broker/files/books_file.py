"""run_dir/books.json: the books of ended lives, so that an empty Redis gets them from a new broker. Mode 0600.

The reporter's thread writes the file before it writes to Redis. So after any crash, either both have a life as folded,
or Redis still has its row.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.schemas.accounts.folded_lives import CountsByName, FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.basics.bounds import GroupName
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.errors import RunDirError, reading


class EndedLives(BaseModel):
    """The content of the file: the folded lives by slot, and ended lives that have a row of their own."""

    model_config = ConfigDict(frozen=True)
    folded: dict[int, FoldedLives] = {}
    rows: list[LedgerRow] = []
    counters: list[CountsByName] = []
    """Other counters of each of these rows, in the same order."""
    groups: dict[GroupName, EndedLives] = {}
    """The same of each consumer group besides the learner's."""

    def counters_of(self) -> dict[tuple[int, int], dict[str, int]]:
        """Return the other counters of these rows, by (slot, incarnation)."""
        return {(row.slot, row.incarnation): own for row, own in zip(self.rows, self.counters, strict=False)}


class _Content(EndedLives):
    fleet_id: str


class BooksFile:
    """The file of one fleet."""

    def __init__(self, run_dir: Path, fleet_id: str) -> None:
        self._path = run_dir / "books.json"
        self._fleet_id = fleet_id

    def read(self) -> EndedLives:
        """Return the content of the file; empty if there is no file. Raises `RunDirError` for a damaged one."""
        return self._read() or EndedLives()

    def needs_witness(self) -> bool:
        """Return whether lifetime.json must have a sum of the ended lives. Raises `RunDirError` for a damaged file."""
        content = self._read()
        return content is not None and bool(content.folded or content.rows)

    def _read(self) -> _Content | None:
        try:
            with reading(self._path, "the file of ended lives"):
                text = read_regular(self._path)
            content = _Content.model_validate_json(text)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = f"{self._path.name} is damaged ({type(error).__name__}); remove it only if Redis has the books"
            raise RunDirError(str(self._path.parent), reason) from error
        if content.fleet_id != self._fleet_id:
            raise RunDirError(str(self._path.parent), f"its {self._path.name} is of fleet {content.fleet_id!r}")
        return content

    def write(self, ended: EndedLives) -> None:
        """Replace the file. Raises `OSError`."""
        content = _Content.model_construct(**dict(ended) | {"fleet_id": self._fleet_id})
        replace_private(self._path, content.model_dump_json().encode())
