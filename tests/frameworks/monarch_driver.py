"""A program for Monarch: an actor for each of three ranks; the process of a rank that was killed is started again,
unless it is lost. Prints a report."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from monarch.actor import ActorError, this_host

from tests.frameworks.actor_ranks import WORLD_SIZE
from tests.frameworks.monarch_ranks import Worker


async def main(fault: str, port: int) -> None:
    procs = this_host().spawn_procs(per_host={"ranks": WORLD_SIZE})
    workers = procs.spawn("workers", Worker)
    replaced: list[int] = []

    async def keep(rank: int) -> Any:
        while True:
            try:
                return await workers.slice(ranks=rank).run.call_one(rank, port, fault)
            except ActorError as error:
                if "BrokenProcessPool" not in str(error) or rank in replaced:
                    raise
                if fault.startswith("lose"):
                    return None
                replaced.append(rank)

    refused = await workers.slice(ranks=0).run_here.call_one()
    found = await asyncio.gather(*map(keep, range(WORLD_SIZE)))
    print(json.dumps({"found": found, "replaced": replaced, "refused": refused}))
    await procs.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
