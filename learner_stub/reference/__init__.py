"""The reference learner: its process, and PPO."""
