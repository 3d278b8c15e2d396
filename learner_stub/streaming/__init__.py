"""The stream of episode chunks, from the broker's messages to batches without holes."""
