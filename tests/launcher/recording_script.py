"""Fails with an exception that torch's @record writes down."""

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    raise ValueError("what the worker says")


if __name__ == "__main__":
    main()
