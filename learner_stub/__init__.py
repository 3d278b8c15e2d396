"""The learner's side: a stream of episode chunks, a publisher of weights, and a reference PPO."""
