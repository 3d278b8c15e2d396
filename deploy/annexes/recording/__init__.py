"""Recordings: the batches of a fleet as Parquet files, written by `headrace record`. Needs the extra `record`."""
