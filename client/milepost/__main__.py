"""`python -m milepost`: the same as the `milepost` command."""

from milepost.cli import main

main()
