"""Say which files of tests are to be run again, whole, after a gate that failed; or that none are.

`python .ci/flakes.py RESULTS.xml` reads pytest's JUnit file, prints a line for each flake and then
the files. It exits with 1 if nothing may be tried again: an error while a fixture was set up or
taken down (there the judges of checkpoints stand, and a bad checkpoint must not turn green), or
failures in more than `FILES_MAX` files.
"""

from __future__ import annotations

import sys
from typing import Final
from xml.etree import ElementTree

FILES_MAX: Final = 2
"""Files with a failure that a gate may have: real processes on a shared machine run out of time now
and then, but not in many places at once."""


def files_to_repeat(results: ElementTree.Element) -> tuple[str, ...]:
    """Return the files in which a test failed, if they may be tried again, else nothing."""
    cases = list(results.iter("testcase"))
    if any(case.find("error") is not None for case in cases):
        return ()
    failed = {case.get("classname", "") for case in cases if case.find("failure") is not None}
    files = sorted(name.replace(".", "/") + ".py" for name in failed)
    return tuple(files) if len(files) <= FILES_MAX else ()


def main(path: str) -> int:
    """Print what is to be repeated; return the exit code."""
    results = ElementTree.parse(path).getroot()
    for case in results.iter("testcase"):
        for kind in ("failure", "error"):
            if case.find(kind) is not None:
                print(f"{kind}: {case.get('classname')}::{case.get('name')}", file=sys.stderr)
    files = files_to_repeat(results)
    print("\n".join(files))
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
