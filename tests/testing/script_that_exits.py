"""A script that ends as many do."""

from __future__ import annotations

import sys

import inprocess


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    call.ping()


if __name__ == "__main__":
    train()
    sys.exit({"0": 0, "None": None}[sys.argv[1]])
