"""The command `headrace rerun`: repeats an episode in which an env failed."""
