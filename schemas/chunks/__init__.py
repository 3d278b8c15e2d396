"""Episodes in pieces: spaces, chunks, batches, what readers look back on, open episodes."""
