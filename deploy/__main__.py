"""Entry point of `python -m headrace.deploy`, the `headrace` command. The supervisor starts its children by it."""

from headrace.deploy.entry import main

main()
