"""HTTP for a policy server's clients."""
