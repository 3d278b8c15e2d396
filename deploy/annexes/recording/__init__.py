"""Recordings: the batches of a fleet as Parquet files, written by `headrace record`, and a stream of them.

Needs the extra `record`.
"""

from importlib.util import find_spec

from headrace.schemas.errors import ConfigError

NEEDS_PYARROW = "a recording needs pyarrow: pip install 'headrace[record]'"


def check_pyarrow() -> None:
    """Raise `ConfigError` if pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise ConfigError(NEEDS_PYARROW)
