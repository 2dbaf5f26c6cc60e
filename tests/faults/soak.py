"""A soak: many small saves on two daemons with one rank each, with random delays and faults.

    python -m tests.faults.soak [--saves 300] [--seed N] [--bytes N] [--optimize]

First prints its options, so that you can repeat the run (the seed decides faults and delays, but
not the timing). Then prints a table. Exits with 1 if a save hung or ended in two ways, if a
checkpoint is not whole, or if memory, descriptors, threads, sockets or files leak.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.faults.fleet import Crew, fired, members, resources, until
from tests.faults.judging import check_root, judge, partials

DELAY_S_MAX: Final = 0.05

FAULT_SHARE: Final = 0.2
"""Share of saves that one node spoils."""

KILL_SHARE: Final = 0.06
"""Share of saves during which a daemon is killed at a random moment."""

RESHAPE_SHARE: Final = 0.05
"""Share of saves whose state has the other of two structures."""

RSS_BYTES: Final = 16 << 20
"""How much a process may grow, in addition to a tenth: allocators keep freed memory."""

KEPT: Final = 5


class Options(NamedTuple):
    """The options of a run."""

    saves: int
    seed: int
    bytes: int
    """Size of one save, both ranks together."""
    optimize: bool
    """Run the daemons as `python -O`, where asserts do nothing."""


class Plan(NamedTuple):
    """What will happen; everything is drawn before the first save."""

    faults: list[list[str]]
    """By node."""
    kills: dict[int, int]
    """Step and node."""
    widths: dict[int, int]
    """Steps with the other structure."""
    calm_from: int
    """After this step no process is killed, so that the growth of each can be measured."""


def draw(options: Options) -> Plan:
    """Draw the faults of a run."""
    from milepostd.ops.faults import (
        POINTS,  # The judge imports this file, and must not import ours.
    )

    chance = random.Random(options.seed)
    # The other node meets those of its own part only.
    points = (POINTS, ("after-staged", "mid-write", "after-write", "before-durable"))
    calm_from = options.saves - max(options.saves // 3, 6)
    plan = Plan([[], []], {}, {}, calm_from)
    for step in range(1, options.saves):
        for node in (0, 1):
            point = chance.choice(points[node])
            plan.faults[node].append(f"{point}:sleep:{chance.uniform(0, DELAY_S_MAX):.3f}@{step}")
        if chance.random() < FAULT_SHARE:
            actions = ("eio", "enospc", "raise", "stop") + (("kill",) * 4) * (step < calm_from)
            node = chance.randrange(2)
            fault = f"{chance.choice(points[node])}:{chance.choice(actions)}@{step}"
            plan.faults[node].append(fault)
        if chance.random() < KILL_SHARE and step < calm_from:
            plan.kills[step] = chance.randrange(2)
        if chance.random() < RESHAPE_SHARE:
            plan.widths[step] = 8
    return plan


def soak(options: Options, folder: Path, shm: Path) -> dict[str, Any]:
    """Run it; return what happened. Raises AssertionError if anything happened that must not."""
    from milepost import KeepLast

    plan = draw(options)
    chance = random.Random(options.seed + 1)
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    values = options.bytes // 8 // 2
    daemon = {**places, "PYTHONOPTIMIZE": "1"} if options.optimize else places
    phases: collections.Counter[str] = collections.Counter()
    known: set[str] = set()
    before: dict[str, dict[str, int]] = {}
    started_s = time.monotonic()
    with members(folder, root, plan.faults, **daemon) as daemons:
        crew = Crew(
            root, [member.node for member in daemons], environment=places, keep=KeepLast(KEPT)
        )

        def measure() -> dict[str, dict[str, int]]:
            counts = {f"daemon {n}": resources(member.pid) for n, member in enumerate(daemons)}
            return counts | {f"rank {n}": each for n, each in enumerate(crew.all("resources"))}

        def finish(step: int) -> None:
            told = crew.all("finish", step=step)
            ends = {(each["phase"], each["message"]) for each in told}
            assert 1 == len(ends), f"step {step} ended in two ways: {told}"
            assert told[0]["phase"] in ("committed", "failed"), f"step {step}: {told}"
            phases[told[0]["phase"]] += 1

        def is_tidy() -> bool:
            return not partials(root) and len(list(root.glob("step_*"))) <= KEPT

        pending: list[int] = []
        for step in range(1, options.saves + 1):
            shape = {"values": values, "width": plan.widths.get(step, 0)}
            first = chance.randrange(2)
            crew.tell(first, "begin", step=step, **shape)
            time.sleep(chance.uniform(0, DELAY_S_MAX))
            crew.tell(1 - first, "begin", step=step, **shape)
            if step in plan.kills:
                time.sleep(chance.uniform(0, DELAY_S_MAX))
                daemons[plan.kills[step]].kill()
            for rank in (0, 1):
                crew.hear(rank)
            pending.append(step)
            # The last save, which no fault is meant for, is to find everything well.
            while len(pending) > (chance.randrange(2) if step < options.saves else 0):
                finish(pending.pop(0))
            if not pending and step % 10 == 0:
                until(is_tidy, "nothing is left over when nothing is under way")
                check_root(root, known)
            if step >= plan.calm_from + 3 and not before and not pending:
                before = measure()
        assert phases["committed"] > options.saves // 2, phases
        assert f"step_{options.saves}" == os.readlink(root / "latest")
        until(is_tidy, "nothing is left over")
        after = measure()
        arenas = len(os.listdir(shm))
        assert arenas <= 2, f"{arenas} arenas of 2 ranks"
        counts = collections.Counter(
            each.action for member in daemons for each in fired(member.node)
        )
        crew.dismiss()
    for who, was in before.items():
        now = after[who]
        assert now["rss"] <= was["rss"] * 1.1 + RSS_BYTES, f"{who} grew: {was} to {now}"
        for what in ("descriptors", "threads", "sockets"):
            # One more may be open at the moment of a look; a leak comes with every save.
            assert now[what] <= was[what] + 2, f"{who} has more {what}: {was} to {now}"
    assert [] == os.listdir(shm), "shared memory is left over"
    names = check_root(root)
    judge(root, ["latest", *names], values=values)
    return {
        "phases": dict(phases),
        "fired": dict(counts),
        "killed": len(plan.kills),
        "lives": [member.lives for member in daemons],
        "before": before,
        "after": after,
        "kept": names,
        "elapsed_s": time.monotonic() - started_s,
    }


def main(arguments: Sequence[str]) -> int:
    """Run a soak from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--saves", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--optimize", action="store_true")
    options = Options(**vars(parser.parse_args(arguments)))
    print("options", " ".join(f"--{name} {value}" for name, value in options._asdict().items()))
    folder = Path(tempfile.mkdtemp(prefix="mp-soak-"))
    shm = Path(tempfile.mkdtemp(prefix="mp-soak-", dir="/dev/shm"))
    try:
        told = soak(options, folder, shm)
    except AssertionError as error:
        print(f"failed: {error}")
        print(f"logs: {folder}/n0/test.log {folder}/n1/test.log")
        return 1
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    shutil.rmtree(folder)
    for name, count in {**told["phases"], **told["fired"]}.items():
        print(f"{name:12} {count}")
    print(f"{'killed':12} {told['killed']}, lives {told['lives']}")
    for who, now in told["after"].items():
        was = told["before"][who]
        pairs = ", ".join(f"{what} {was[what]} -> {now[what]}" for what in now)
        print(f"{who:12} {pairs}")
    print(f"ended well after {told['elapsed_s']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
