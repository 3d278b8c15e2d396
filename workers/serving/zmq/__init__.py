"""The policy server's ZeroMQ side."""
