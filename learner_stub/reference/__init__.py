"""The reference learner: its process, and the algorithms."""
