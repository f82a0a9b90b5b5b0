"""`python -m selfspec`: the command line, where its script is not on the path."""

from .cli.app import main

main()
