"""Episodes in pieces: spaces, chunks, batches, what readers look back on, the log of open episodes."""
