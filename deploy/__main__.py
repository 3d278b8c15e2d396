"""Entry point of `python -m headrace.deploy`, the `headrace` command. The supervisor starts its children by it."""

from headrace.deploy.command.entry import main

main()
