"""What can be done with checkpoints and daemons from outside a training run: a module per command.

Each returns data, plain Structs that `--json` prints as they are; `milepost.cli` shows them.
"""
