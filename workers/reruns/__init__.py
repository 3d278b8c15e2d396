"""What a worker keeps of an episode in which an env fails, so that `headrace rerun` can repeat it."""
