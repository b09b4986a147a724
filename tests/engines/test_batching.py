import random

import pytest

from envace.engines.base import TrainingRow
from envace.engines.local.batching import bundles, common_prefixes, micro_batches


def row(ids, first) -> TrainingRow:
    mask = (0,) * first + (1,) * (len(ids) - first)
    numbers = tuple(map(float, ids))
    return TrainingRow(tuple(ids), mask, numbers, numbers, "act", temperature=ids[-1] + 1.0, weight=ids[0] + 1.0)


def rows_of(prompts: int, each: int, seed: int = 0) -> list[TrainingRow]:
    rng = random.Random(seed)
    rows = []
    for _ in range(prompts):
        prompt = [rng.randrange(90) for _ in range(rng.randint(20, 60))]
        rows += [
            row([*prompt, *(rng.randrange(90) for _ in range(rng.randint(1, 30)))], len(prompt)) for _ in range(each)
        ]
    return rng.sample(rows, len(rows))


def whole(bundle) -> list[tuple]:
    """The rows a bundle stands for."""
    found = []
    for batch in bundle.batches:
        for item in batch:
            prefix = bundle.prefixes[item.prefix] if bundle.prefixes else ()
            found.append((prefix + item.ids, len(prefix) + item.mask.index(1), item.temperature, item.weight))
            assert item.logprobs == item.advantages == tuple(map(float, item.ids))
    return found


def test_micro_batches_keep_to_budget_and_padding_and_lose_nothing():
    rows = rows_of(6, 5)
    cut = list(micro_batches(rows, 200, 20))
    assert sorted(id(r) for batch in cut for r in batch) == sorted(map(id, rows))
    for batch in cut:
        longest = max(len(r.ids) for r in batch)
        assert len(batch) == 1 or len(batch) * longest <= 200
        assert sum(longest - len(r.ids) for r in batch) <= 20


@pytest.mark.parametrize("budget", [10, 150, 400, 10_000])
def test_bundles_lose_nothing_and_keep_to_the_budget(budget):
    rows = rows_of(6, 5)
    made = bundles(rows, budget, 30, share=True)
    expected = sorted((r.ids, r.mask.index(1), r.temperature, r.weight) for r in rows)
    assert sorted(one for bundle in made for one in whole(bundle)) == expected
    for bundle in made:
        width = len(bundle.prefixes) * max(map(len, bundle.prefixes), default=0)
        for batch in bundle.batches:
            assert len(batch) == 1 or width + len(batch) * max(len(r.ids) for r in batch) <= budget
    assert all(r.mask.index(1) >= 1 for bundle in made for batch in bundle.batches for r in batch)
    apart = bundles(rows, budget, 30, share=False)
    assert sum(bundle.tokens for bundle in made) < sum(bundle.tokens for bundle in apart)


def test_rows_in_another_order_are_bundled_the_same_way():
    rows = rows_of(4, 4)
    assert bundles(rows, 400, 30, True) == bundles(rows[::-1], 400, 30, True)


def test_a_row_without_a_sampled_token_is_left_out():
    assert bundles([TrainingRow((1, 2), (0, 0), (0.0, 0.0), (0.0, 0.0), "act")], 100, 10, True) == []


def test_nested_prefixes_are_shared_where_it_saves_most():
    system, one, other = list(range(40)), list(range(100, 180)), list(range(200, 280))
    deep = [row([*system, *one, number, number], 120) for number in range(3)]
    shallow = [row([*system, *other, number, number], 41) for number in range(3)]
    stranger = row([7, 8, 9, 10], 3)
    groups, alone = common_prefixes([*deep, *shallow, stranger])
    assert alone == [stranger]
    # The token before the first sampled one is computed with its row.
    assert sorted((len(prefix), len(rows)) for prefix, rows in groups) == [(40, 3), (119, 3)]


def test_a_short_common_beginning_is_not_shared():
    rows = [row([*range(20), number, number], 20) for number in range(2)]
    assert common_prefixes(rows) == ([], rows)


def test_a_deeper_prefix_stays_shared_where_the_shallow_one_saves_too_little():
    deep = [row([*range(12), *range(50, 90), number, number], 52) for number in range(2)]
    other = row([*range(12), 8, 9, 10], 14)
    groups, alone = common_prefixes([*deep, other])
    assert [(len(prefix), len(rows)) for prefix, rows in groups] == [(51, 2)]
    assert alone == [other]
