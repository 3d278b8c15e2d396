"""Errors of a policy server, or of an external env, that tests expect by their word on the wire."""

from __future__ import annotations

import pytest

from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.serving import code_of


def refused(code: str, match: str | None = None) -> pytest.RaisesExc[HeadraceError]:
    """Expect an error with this code, and a message that matches."""
    return pytest.raises(HeadraceError, match=match, check=lambda error: code_of(error) == code)
