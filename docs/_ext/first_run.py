"""Write into README and quickstart what `make run` prints at its end: both show rows of one run, by their labels.

python docs/_ext/first_run.py     (on a machine that does nothing else)
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "README.md", ROOT / "docs" / "quickstart.md"
ROW = re.compile(r"^│ (?P<label>[a-z ]+?) +│.*│$", re.MULTILINE)


def command() -> list[str]:
    """Return the command of `make run`, from the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    [line] = re.findall(r"^run:.*\n\t\$\(BIN\)/(.*)$", makefile, re.MULTILINE)
    return shlex.split(line)


def rows(text: str) -> dict[str, str]:
    """Return the rows of printed tables by their labels."""
    return {row["label"]: row[0] for row in ROW.finditer(text)}


def fill(text: str, printed: dict[str, str]) -> str:
    """Return the text of a page with its rows as they were printed."""
    return ROW.sub(lambda row: printed[row["label"]], text)


if __name__ == "__main__":
    program, *arguments = command()
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [Path(sys.executable).parent / program, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text, rows(run.stdout)), encoding="utf-8")
