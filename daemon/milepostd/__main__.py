"""`python -m milepostd`, as clients start an embedded daemon."""

from __future__ import annotations

from milepostd.cli import main

if __name__ == "__main__":
    main()
