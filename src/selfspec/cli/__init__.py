"""The command `selfspec`: one module per command, registered in `app`. Thin: parse, call, print.

Nothing heavy is imported before a command runs, so that `selfspec --help` answers at once.
"""
