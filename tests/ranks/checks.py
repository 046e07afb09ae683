"""What the rows of the fault table say about the results of a run."""

from __future__ import annotations

from collections.abc import Collection

from tests.harness import Ranks


def went_on(ranks: Ranks, without: Collection[int] = (), iteration: int = 1) -> None:
    """All but `without` finished in that iteration, with consecutive ranks in their old order, and exit cleanly."""
    survivors = [result for result in ranks if result.rank not in without]
    expected = [[iteration, place, len(survivors)] for place in range(len(survivors))]
    assert [result.value for result in survivors] == expected, ranks.exceptions
    assert [result.exception for result in survivors] == [None] * len(survivors)
    assert [result.exitcode for result in survivors] == [0] * len(survivors)


def died(ranks: Ranks, exitcodes: dict[int, int]) -> None:
    """These ranks ended with these exit codes and did not come to the end of their function."""
    assert {rank: ranks[rank].exitcode for rank in exitcodes} == exitcodes
    assert not any(ranks[rank].done for rank in exitcodes)


def failed(ranks: Ranks, kinds: dict[int, str]) -> None:
    """These ranks left with an exception of that type, as processes that ended in an orderly way."""
    assert {rank: ranks[rank].exception for rank in kinds} == kinds
    assert [ranks[rank].exitcode for rank in kinds] == [0] * len(kinds)
