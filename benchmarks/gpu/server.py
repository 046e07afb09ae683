"""Measures what it is asked for on stdin, one line of JSON each, and answers with one: `... server cuda 1`.

The process has imported everything its ranks need, and forks them. It never begins CUDA itself: they could not then.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch._dynamo  # noqa: F401  (the first optimizer would import it)

from benchmarks.gpu import live, restart, step
from benchmarks.gpu.place import Place
from benchmarks.gpu.plan import Request

MEASURES = {"restart": restart.measure, "step": step.measure, "live": live.measure}


def answer(place: Place, line: str) -> dict[str, Any]:
    request = Request(**json.loads(line))
    return MEASURES[request.part](place, request)


def main() -> None:
    place = Place(sys.argv[1], int(sys.argv[2]))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever else is printed is no answer
        for line in sys.stdin:
            print(json.dumps(answer(place, line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
