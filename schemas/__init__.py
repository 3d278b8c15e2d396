"""What all processes share: messages, chunks, spaces, settings, keys and errors. It imports none of the others."""
