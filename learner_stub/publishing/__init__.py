"""The publisher of weights and of a learner's rows."""
