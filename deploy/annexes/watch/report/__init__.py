"""`headrace report`: one HTML file of a run, its facts and its curves."""
