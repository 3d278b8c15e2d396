"""`python -m headrace.deploy` is the `headrace` command: this is how the supervisor starts its children."""

from headrace.deploy.cli import main

main()
