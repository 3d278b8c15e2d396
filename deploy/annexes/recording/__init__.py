"""Recordings: the batches of a fleet as Parquet files, written by `headrace record`, and a stream of them.

Needs the extra `record`.
"""

NEEDS_PYARROW = "a recording needs pyarrow: pip install 'headrace[record]'"
