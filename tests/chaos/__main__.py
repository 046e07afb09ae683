"""`python -m tests.chaos --minutes 10`: jobs until the time is over; `--seed N --jobs 1` plays one job again."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from inprocess.testing.server import become_subreaper, heed_ctrl_c, start_server
from tests.chaos import verdict
from tests.chaos.play import play
from tests.chaos.schedule import Job, random_job
from tests.chaos.training import surviving
from tests.chaos.verdict import Facts


@dataclass
class Tally:
    """What happened in all jobs."""

    jobs: int = 0
    failed: list[int] = field(default_factory=list)
    restarts: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)

    def add(self, facts: Facts) -> None:
        self.restarts += facts.restarts
        self.steps += len(surviving(list(facts.log), facts.job.live))
        self.faults.update(strike.kind for strike in facts.all_struck)
        self.ends.update(str(verdict.fate(result)) for result in facts.ranks)
        self.limits.update(verdict.limits(facts))

    def table(self) -> str:
        lines = [f"{self.jobs} jobs, {self.faults.total()} faults, {self.restarts} restarts, {self.steps} steps"]
        for title, counts in (("faults", self.faults), ("ends of ranks", self.ends), ("known limits", self.limits)):
            lines += ["", title, *(f"  {count:5}  {name}" for name, count in counts.most_common())]
        lines += ["", f"failed seeds: {self.failed or 'none'}"]
        return "\n".join(lines)


def one(seed: int, tally: Tally, tell: bool) -> None:
    job, start, story = random_job(seed), time.monotonic(), io.StringIO()
    tally.jobs += 1
    try:
        with contextlib.redirect_stdout(story):
            facts = play(job)
    except AssertionError as error:
        tally.failed.append(seed)
        print(story.getvalue(), schedule(job), error, sep="\n")
        print(f"seed {seed} failed; again: --seed {seed} --jobs 1", flush=True)
        return
    if tell:
        print(story.getvalue(), schedule(job), sep="\n")
    tally.add(facts)
    seconds, struck = time.monotonic() - start, len(facts.all_struck)
    kind = ", ".join([job.assignment, *["in memory"] * job.live, *["store lost"] * bool(job.host)])
    print(
        f"seed {seed}: {job.world_size} ranks, {kind}: {struck} of {len(job.strikes)} faults, "
        f"{facts.restarts} restarts, {len(surviving(list(facts.log), job.live))} steps, {seconds:.1f} s "
        f"{verdict.limits(facts) or ''}",
        flush=True,
    )


def schedule(job: Job) -> str:
    lines = [f"  {number:3} at {s.at:6.3f} rank {s.rank} {s.kind} {s.fault}" for number, s in enumerate(job.strikes)]
    return "\n".join([f"seed {job.seed}: {job.world_size} ranks, {job.assignment}, {job.seconds:.1f} s", *lines])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="no job begins after that (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job (default 0)")
    parser.add_argument("--jobs", type=int, default=10**6, help="at most so many jobs")
    parser.add_argument("--story", action="store_true", help="print the story of jobs that went well, too")
    given = parser.parse_args(arguments)
    become_subreaper()
    heed_ctrl_c()
    start_server()
    end, tally = time.monotonic() + given.minutes * 60, Tally()
    for seed in range(given.seed, given.seed + given.jobs):
        if time.monotonic() > end:
            break
        one(seed, tally, given.story)
    print(tally.table(), flush=True)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
