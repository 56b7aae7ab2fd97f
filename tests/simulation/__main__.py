"""Play random fault schedules until the time is up: ``python -m tests.simulation --minutes 10``.

Ends with exit code 1 and the failing schedules, each with its seed and the faults that matter.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time

from tests.simulation.invariants import broken, told
from tests.simulation.schedule import Schedule

ENOUGH = 10
"""Failing schedules after which it is no use to go on."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, help="the first seed; without it, one that nobody has tried")
    parser.add_argument("--count", type=int, help="how many seeds, if time allows")
    options = parser.parse_args()
    first = random.randrange(10**12) if options.first is None else options.first
    until, failing, played = time.monotonic() + 60 * options.minutes, 0, 0
    for seed in range(first, first + options.count) if options.count else itertools.count(first):
        if time.monotonic() > until or failing == ENOUGH:
            break
        played += 1
        if broken(schedule := Schedule.draw(seed)):
            failing += 1
            print(told(seed, schedule), end="\n\n", flush=True)
    print(f"{played} schedules from seed {first}, {failing} failing")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
