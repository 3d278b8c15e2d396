"""The simulated world of sessions and brokers, and the judge of its histories."""
