"""A learner's connections to the brokers of its fleet."""
