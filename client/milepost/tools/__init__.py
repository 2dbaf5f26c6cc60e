"""Commands for checkpoints and daemons, for use outside of a training run: a module per command.

Each returns plain Structs, which `--json` prints unchanged and `milepost.cli` shows.
"""
