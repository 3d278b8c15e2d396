"""Recordings: the batches of a fleet as Parquet files, written by `headrace record`, and a stream of them.

Needs the extra `record`.
"""

from headrace.schemas.settings.plugins import check_package


def check_pyarrow() -> None:
    """Raise `ConfigError` if pyarrow cannot be imported."""
    check_package("a recording", "pyarrow", "record")
