import torch

from envace.engines.local.cache import PrefixCache, RowCache


def layers(ids, heads=2, dim=3):
    """Two layers whose keys hold the token itself and whose values its negative, so that misplaced columns show."""
    keys = torch.tensor(ids, dtype=torch.float32)[None, :, None].expand(heads, -1, dim)
    return [(keys + 1000 * layer, -(keys + 1000 * layer)) for layer in range(2)]


def kept(rows: RowCache, row: int) -> list[int]:
    (first, negative), (second, _) = rows.row(row)
    assert torch.equal(first, -negative) and torch.equal(second, first + 1000)
    return first[0, :, 0].int().tolist()


def test_rows_of_any_length_stay_whole_as_others_come_grow_and_go():
    rows, wanted = RowCache(4), [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    for ids in wanted:
        rows.add(layers(ids), len(ids))
    for token in range(20, 220):  # far beyond the first capacity
        rows.ensure_column()
        assert rows.mask().sum(dim=1).tolist() == [len(ids) + 1 for ids in wanted]
        column = torch.full((3, 2, 1, 3), float(token))
        for layer, view in enumerate(rows.view(2).layers):
            view.update(column + 1000 * layer, -(column + 1000 * layer))
        rows.advance()
        for ids in wanted:
            ids.append(token)
    assert [kept(rows, row) for row in range(3)] == wanted
    rows.release(0)
    assert rows.compact() == [(2, 0)]
    assert [kept(rows, row) for row in range(2)] == [wanted[2], wanted[1]]
    longer = list(range(400, 1100))
    assert rows.add(layers(longer), len(longer)) == 2
    assert [kept(rows, row) for row in range(3)] == [wanted[2], wanted[1], longer]


def test_a_new_row_takes_a_released_place_and_the_rest_is_closed_up():
    rows, wanted = RowCache(6), [[n, n + 10, n + 20][: 1 + n % 3] for n in range(6)]
    for ids in wanted:
        rows.add(layers(ids), len(ids))
    for row in (1, 5, 3, 2):
        rows.release(row)
    assert rows.add(layers([77, 78]), 2) == 2
    assert rows.compact() == [(4, 1)]  # 3 and 5 were last by then
    assert [kept(rows, row) for row in range(3)] == [wanted[0], wanted[4], [77, 78]]
    assert rows.lengths == [1, 2, 2]
    assert rows.compact() == []
    for row in range(3):
        rows.release(row)
    assert (rows.compact(), rows.lengths, rows.end - rows.start) == ([], [], 0)
    assert rows.add(layers([5]), 1) == 0


def test_the_longest_common_prefix_is_found_to_the_token():
    cache = PrefixCache(1000)
    stored = tuple(range(50))
    cache.store(stored, layers(stored))
    common, found = cache.find((*range(37), 99, 98))
    assert common == 37
    assert found[1][0][0, :, 0].tolist() == [1000.0 + token for token in range(37)]
    assert cache.find(stored)[0] == 49  # at least one token is left to compute
    assert cache.find((*stored, 7))[0] == 50
    assert cache.find((99, *range(49))) == (0, [])


def test_a_longer_conversation_takes_the_place_of_its_beginning():
    cache = PrefixCache(1000)
    for size in (20, 45, 45, 30):
        cache.store(tuple(range(size)), layers(range(size)))
    assert cache.tokens == 45
    cache.store((*range(40), 99, 98, 97), layers((*range(40), 99, 98, 97)))  # a sibling: another completion
    assert cache.tokens == 88
    assert cache.find((*range(40), 99, 98, 1))[0] == 42


def test_least_recently_used_goes_first_and_shared_beginnings_survive_it():
    cache, shared = PrefixCache(100), tuple(range(16))
    first, second, third = ((*shared, *range(start, start + 24)) for start in (100, 200, 300))
    cache.store(first, layers(first))
    cache.store(second, layers(second))
    assert cache.find((*first, 0))[0] == 40  # used again, so the second is now the oldest
    cache.store(third, layers(third))
    assert cache.tokens == 80
    assert cache.find((*first, 0))[0] == cache.find((*third, 0))[0] == 40
    assert cache.find((*second, 0))[0] == 16
    cache.clear()
    assert (cache.tokens, cache.find(first)) == (0, (0, []))
