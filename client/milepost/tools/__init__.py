"""What can be done to checkpoints and daemons from outside a training run: one module a command.

Each returns data, plain Structs that `--json` prints as they are; `milepost.cli` shows them.
"""
