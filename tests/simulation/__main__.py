"""`python -m tests.simulation --seed 7 --nodes 4096`: one run, or runs for hours.

Prints what the seed drew and the command that reruns it, then what happened, and ends with
`commits <n>` and `trace hash <hex>`. Exit codes: 0 all well; 1 crash: the core or the simulation
raised; 2 usage; 3 safety: something happened that must never happen; 4 liveness: something did not
happen in time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
from typing import Final

from tests.simulation.oracle import LivenessViolation, SafetyViolation
from tests.simulation.run import Options, Result, Run, draw_options

CRASH: Final = 1
SAFETY: Final = 3
LIVENESS: Final = 4


def rerun(options: Options) -> str:
    """Return the command that does the same again."""
    nodes = f" NODES={options.nodes}" if options.is_nodes_given else ""
    return f"make sim SEED={options.seed}{nodes}"


def attempt(options: Options) -> tuple[int, Result | None]:
    """Run once; return the exit code and, if all was well, the result."""
    try:
        return 0, Run(options).go()
    except SafetyViolation as error:
        code, what = SAFETY, f"safety violated {error}"
    except LivenessViolation as error:
        code, what = LIVENESS, f"liveness violated {error}"
    except Exception:
        code, what = CRASH, f"crash\n{traceback.format_exc()}"
    print(what)
    print(f"rerun: {rerun(options)}")
    return code, None


def once(seed: int, nodes: int) -> int:
    """Make one run and print everything about it."""
    options = draw_options(seed, nodes)
    print(f"rerun: {rerun(options)}")
    for name, value in options.words().items():
        print(f"  {name}: {value}")
    sys.stdout.flush()
    started_s = time.monotonic()
    code, result = attempt(options)
    if result is None:
        return code
    print(f"faults {result.fired or 'none'}")
    print(f"seen {result.marks}")
    print(
        f"{result.events} events, {result.attempts} attempts, {result.virtual_s:.0f} s of virtual "
        f"time in {time.monotonic() - started_s:.1f} s"
    )
    print(f"commits {result.commits}")
    print(f"trace hash {result.trace_hash}")
    return 0


def for_hours(hours: float, seed: int, nodes: int) -> int:
    """Run seed after seed until the time is over; end at the first violation."""
    print(f"rerun: make sim SEED={seed} HOURS={hours:g}" + (f" NODES={nodes}" if nodes else ""))
    until_s = time.monotonic() + hours * 3600
    commits, runs = 0, 0
    digest = hashlib.blake2b(digest_size=16)
    fired: dict[str, int] = {}
    while time.monotonic() < until_s:
        code, result = attempt(draw_options(seed + runs, nodes))
        if result is None:
            return code
        runs += 1
        commits += result.commits
        digest.update(result.trace_hash.encode())
        for kind, count in result.fired.items():
            fired[kind] = fired.get(kind, 0) + count
        if runs % 100 == 0:
            print(f"{runs} runs, up to seed {seed + runs - 1}, {commits} commits", flush=True)
    print(f"faults {dict(sorted(fired.items()))}")
    print(f"{runs} runs, seeds {seed} to {seed + runs - 1}")
    print(f"commits {commits}")
    print(f"trace hash {digest.hexdigest()}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="draws everything; default: a new one")
    parser.add_argument("--nodes", type=int, default=0, help="0: drawn by the seed")
    parser.add_argument("--hours", type=float, default=0.0, help="seed after seed for so long")
    given = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if given.seed is None else given.seed
    if given.hours:
        return for_hours(given.hours, seed, given.nodes)
    return once(seed, given.nodes)


if __name__ == "__main__":
    sys.exit(main())
