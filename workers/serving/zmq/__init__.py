"""ZeroMQ for a policy server's clients."""
