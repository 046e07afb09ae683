"""A wrapped function with a bug: it ends with an error on all ranks."""

import inprocess


@inprocess.Wrapper(max_repeats=2)
def run() -> None:
    raise ValueError("a bug")


if __name__ == "__main__":
    run()
