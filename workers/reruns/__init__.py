"""The steps of open episodes, and the files from which `headrace rerun` repeats those in which an env failed."""
