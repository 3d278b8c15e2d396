"""The broker: it takes batches from workers, holds them until the learner commits, and relays weights."""
