"""Entry point of `python -m headrace`, the `headrace` command."""

from headrace.deploy.entry import main

main()
