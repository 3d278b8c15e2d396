"""Entry point of `python -m headrace`, the `headrace` command."""

from headrace.deploy.cli import main

main()
