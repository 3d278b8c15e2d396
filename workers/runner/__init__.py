"""The public env runners and their state."""
