"""Entry point of `python -m headrace`, the `headrace` command."""

from headrace.deploy.command.entry import main

main()
