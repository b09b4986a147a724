"""How a step's rows are cut into forward passes: little padding, and what rows begin with in common computed once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from envace.engines.base import TrainingRow

Item = TypeVar("Item")
Group = tuple[int, list[int]]
"""The length of a prefix and the numbers of the rows that share it."""
LEAST_SAVED = 32
"""Tokens. Fewer are not worth the rows' own copies of the prefix's keys and values."""
HELD_SHARE = 8
"""A row's copy of a prefix token's keys and values takes about an eighth of the memory of a computed token."""


@dataclass(frozen=True)
class Remainder(TrainingRow):
    """What follows a shared prefix, itself a row."""

    prefix: int = 0
    """Its number among the bundle's prefixes."""


@dataclass(frozen=True)
class Bundle:
    """Forward passes over the same prefixes: one over all of them, then one over each batch of remainders.

    Without prefixes ``batches`` holds whole rows.
    """

    prefixes: Sequence[tuple[int, ...]]
    batches: Sequence[Sequence[TrainingRow]]

    @property
    def tokens(self) -> int:
        """What is computed, padding included."""
        prefixes = len(self.prefixes) * max(map(len, self.prefixes), default=0)
        return prefixes + sum(len(batch) * max(len(row.ids) for row in batch) for batch in self.batches)


def bundles(rows: Sequence[TrainingRow], budget: int, padding: int, share: bool) -> list[Bundle]:
    """All ``rows`` that have a sampled token; prefixes and a batch of their remainders are within ``budget`` tokens.

    Args:
        padding: how many tokens of padding a pass may have before it is worth another pass.
        share: whether rows that begin alike share what they begin with.
    """
    rows = [row for row in rows if any(row.mask)]
    groups, alone = common_prefixes(rows) if share else ([], rows)
    if sum(len(prefix) * (len(some) - 1) for prefix, some in groups) < padding:
        # Saves less than the passes over the prefixes cost.
        groups, alone = [], rows
    found = []
    for some in cut(groups, lambda group: len(group[0]), budget // 2, padding):
        prefixes = [prefix for prefix, _ in some]
        longest = len(prefixes[0])
        rest = [_remainder(row, number, len(prefix)) for number, (prefix, rows) in enumerate(some) for row in rows]
        left = budget - longest * len(prefixes)
        found.append(Bundle(prefixes, list(micro_batches(rest, left, padding, longest // HELD_SHARE))))
    batches = list(micro_batches(alone, budget, padding))
    return [*found, Bundle((), batches)] if batches else found


def micro_batches(rows: Sequence[TrainingRow], budget: int, padding: int, held: int = 0) -> Iterator[list[TrainingRow]]:
    """Rows of similar length together, each batch within ``budget`` tokens, where each row counts ``held`` more."""
    return cut(rows, lambda row: len(row.ids), budget, padding, held)


def cut(
    items: Sequence[Item], size: Callable[[Item], int], budget: int, padding: int, held: int = 0
) -> Iterator[list[Item]]:
    """Items from the largest to the smallest, in runs that are within ``budget`` when padded (a larger one goes alone)."""
    run: list[Item] = []
    padded = 0
    for item in sorted(items, key=size, reverse=True):
        if run:
            largest = size(run[0])
            padded += largest - size(item)
            if padded > padding or (len(run) + 1) * (largest + held) > budget:
                yield run
                run, padded = [], 0
        run.append(item)
    if run:
        yield run


def common_prefixes(
    rows: Sequence[TrainingRow],
) -> tuple[list[tuple[tuple[int, ...], list[TrainingRow]]], list[TrainingRow]]:
    """Groups of rows and the prefix they share, so that the most tokens are saved; and the rows that share none.

    The token before the first sampled one is never in a prefix: its logits are needed.
    """
    # What can be shared of each row, in the order in which those that begin alike are neighbours.
    heads = sorted(((row.ids[: max(0, row.mask.index(1) - 1)], row) for row in rows), key=lambda pair: pair[0])
    common = [_common(one, other) for (one, _), (other, _) in pairwise(heads)]

    def best(begin: int, end: int) -> tuple[int, list[Group]]:
        """Tokens saved among heads ``begin`` .. ``end - 1``, and the groups that save them."""
        if end - begin == 1:
            return 0, []
        shared = min(common[begin : end - 1])
        edges = [begin, *(place + 1 for place in range(begin, end - 1) if common[place] == shared), end]
        parts = [(range(first, last), *best(first, last)) for first, last in pairwise(edges)]
        joining = [part for part in parts if part[1] < shared * len(part[0])]
        together = [number for numbers, _, _ in joining for number in numbers]
        gain, found = shared * (len(together) - 1), [(shared, together)]
        if gain >= max(LEAST_SAVED, 1 + sum(deeper for _, deeper, _ in joining)):
            parts = [part for part in parts if part[1] >= shared * len(part[0])]
        else:
            gain, found = 0, []
        return gain + sum(deeper for _, deeper, _ in parts), found + [group for _, _, inner in parts for group in inner]

    groups = best(0, len(heads))[1] if heads else []
    taken = {number for _, group in groups for number in group}
    return (
        [(heads[group[0]][0][:size], [heads[number][1] for number in group]) for size, group in groups],
        [row for number, (_, row) in enumerate(heads) if number not in taken],
    )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many first tokens are the same. By bisection: comparing slices is far faster than comparing tokens."""
    sizes = range(1, min(len(one), len(other)) + 1)
    return bisect_left(sizes, True, key=lambda size: one[:size] != other[:size])


def _remainder(row: TrainingRow, number: int, size: int) -> Remainder:
    return Remainder(
        ids=row.ids[size:],
        mask=row.mask[size:],
        advantages=row.advantages[size:],
        logprobs=row.logprobs[size:],
        role=row.role,
        temperature=row.temperature,
        weight=row.weight,
        kl=row.kl,
        objective=row.objective,
        prefix=number,
    )
