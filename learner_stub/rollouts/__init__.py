"""From batches to tensors: rollouts, minibatches, returns and log-probs; and what connectors have learnt."""
