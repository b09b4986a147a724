"""Keys and values of the rows being decoded, and of finished prompts that later ones extend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

BLOCK = 16


class _View(DynamicLayer):  # type: ignore[misc]
    """One layer's window on the batch's buffers: a new column is written in place, nothing is copied."""

    def __init__(self, batch: RowCache, layer: int) -> None:
        super().__init__()
        self._batch, self._layer, self.is_initialized = batch, layer, True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        batch = self._batch
        rows, end = key_states.shape[0], batch.end
        keys, values = batch.buffers[self._layer]
        keys[:rows, :, end : end + 1] = key_states
        values[:rows, :, end : end + 1] = value_states
        return keys[:rows, :, batch.start : end + 1], values[:rows, :, batch.start : end + 1]

    def get_seq_length(self) -> int:
        return self._batch.end - self._batch.start


class _Prefilled(DynamicLayer):  # type: ignore[misc]
    """One layer's buffers for a prefill: the reused columns lie there already, the new ones are written behind them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, reused: int) -> None:
        super().__init__()
        self.keys, self.values, self._filled, self.is_initialized = keys, values, reused, True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.keys[:, :, self._filled :] = key_states
        self.values[:, :, self._filled :] = value_states
        self._filled = self.keys.shape[2]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._filled


def prefilled(
    found: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], past: Sequence[int], new: int
) -> DynamicCache:
    """A cache for one pass over ``new`` more tokens of several rows.

    Row i starts with the first ``past[i]`` tokens of ``found[i]`` (per layer keys and values of shape
    [heads, length, dim]), aligned at the right with the other rows' and zero to the left of them.
    """
    cache, width = DynamicCache(), max(past)
    if not width:
        return cache
    layers = []
    for layer, pair in enumerate(next(row for row, kept in zip(found, past, strict=True) if kept)):
        buffers = [part.new_zeros(len(past), part.shape[0], width + new, part.shape[2]) for part in pair]
        for row, kept in enumerate(past):
            if kept:
                for buffer, part in zip(buffers, found[row][layer], strict=True):
                    buffer[row, :, width - kept : width] = part[:, :kept]
        layers.append(_Prefilled(buffers[0], buffers[1], width))
    cache.layers = layers
    return cache


class RowCache:
    """Rows of different lengths, aligned at their right edge, so that pads lie only on the left.

    Attributes:
        lengths: tokens of each row; 0 where a row was released and none has taken its place.
        start, end: columns in use. ``end - start`` is the longest active row.
    """

    def __init__(self, max_rows: int, columns: int = 0) -> None:
        """``columns``: how many to make room for at once, where an earlier cache has shown what is needed."""
        self.max_rows = max_rows
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lengths: list[int] = []
        self.start = self.end = 0
        self._capacity, self._columns = 0, columns
        self._free: list[int] = []

    @property
    def columns(self) -> int:
        """How many columns there is room for."""
        return self._capacity

    def view(self, layers: int) -> DynamicCache:
        cache = DynamicCache()
        cache.layers = [_View(self, layer) for layer in range(layers)]
        return cache

    def mask(self) -> torch.Tensor:
        """[rows, width + 1]: 1 where a column holds a token of the row, the one about to be written included."""
        width = self.end - self.start + 1
        first = width - 1 - torch.tensor(self.lengths)
        return (torch.arange(width) >= first[:, None]).long()

    def advance(self) -> None:
        """One column was written to every row."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]
        self._fit()

    def add(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> int:
        """Adds a row from per-layer (keys, values) of shape [heads, length, dim]; returns its index."""
        if not self.buffers:
            # Zeros, here and where they grow, not whatever memory held: a masked column still must be a finite number.
            self.buffers = [(self._empty(keys), self._empty(values)) for keys, values in layers]
        self._reserve(length)
        if self._free:
            row = self._free.pop()
        else:
            row = len(self.lengths)
            self.lengths.append(0)
        for (keys, values), (new_keys, new_values) in zip(self.buffers, layers, strict=True):
            keys[row, :, self.end - length : self.end] = new_keys
            values[row, :, self.end - length : self.end] = new_values
        self.lengths[row] = length
        self._fit()
        return row

    def row(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A copy of a row's keys and values, per layer [heads, length, dim]."""
        first = self.end - self.lengths[row]
        return [(k[row, :, first : self.end].clone(), v[row, :, first : self.end].clone()) for k, v in self.buffers]

    def release(self, row: int) -> None:
        """Drops a row. Its place is for the next one that comes; where none does, ``compact`` closes the gap."""
        self.lengths[row] = 0
        self._free.append(row)
        self._fit()

    def compact(self) -> list[tuple[int, int]]:
        """Moves last rows to released places, so that rows 0 .. n-1 are all there are; returns (from, to) of each move."""
        moves = []
        for row in sorted(self._free):
            while self.lengths and not self.lengths[-1]:
                self.lengths.pop()
            if row >= len(self.lengths):
                break
            last = len(self.lengths) - 1
            first = self.end - self.lengths[last]
            for keys, values in self.buffers:
                keys[row, :, first : self.end] = keys[last, :, first : self.end]
                values[row, :, first : self.end] = values[last, :, first : self.end]
            self.lengths[row] = self.lengths.pop()
            moves.append((last, row))
        self._free = []
        return moves

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.max_rows, like.shape[0], 0, like.shape[-1])

    def _fit(self) -> None:
        self.start = self.end - max(self.lengths, default=0)

    def _reserve(self, length: int) -> None:
        """Makes room for ``length`` columns left of the edge and at least one right of it."""
        if length <= self.end < self._capacity - 1:
            return
        width = max([length, *self.lengths])
        # Half of the spare room goes to the right of the edge, half to the left, for longer rows to come.
        held = self._capacity or self._columns
        capacity = held if 2 * held >= 3 * width + 64 else 2 * width + 64
        end = capacity - (capacity - width) // 2
        used, old_end, rows = max(self.lengths, default=0), self.end, len(self.lengths)
        for layer, pair in enumerate(
            self.buffers
        ):  # one at a time: old and new ones of all layers would be twice the memory
            moved = [part[:rows, :, old_end - used : old_end].clone() for part in pair]
            if capacity != self._capacity:
                keys, values = (part.new_zeros(*part.shape[:2], capacity, part.shape[3]) for part in pair)
                self.buffers[layer] = (keys, values)
            for buffer, part in zip(self.buffers[layer], moved, strict=True):
                buffer[:rows, :, end - used : end] = part
        self._capacity, self.end = capacity, end
        self._fit()

    def ensure_column(self) -> None:
        """Called before a decode step: there must be a free column right of the edge."""
        if self.lengths and self.end >= self._capacity - 1:
            self._reserve(max(self.lengths))


@dataclass
class _Entry:
    ids: tuple[int, ...]
    keys: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCache:
    """Keys and values of past token sequences, found by their longest common prefix in blocks of 16 tokens.

    Holds at most ``max_tokens`` tokens, least recently used out first. A sequence takes the place of one that it extends,
    so a conversation counts once however many turns it has.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        # Block key to the entries that hold the block, newest last: a prefix stays known while any of them is kept.
        self._holders: dict[int, dict[int, None]] = {}
        self._next = 0

    def find(self, ids: tuple[int, ...]) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The longest stored prefix of ``ids`` (shorter than ``ids``) and per layer its keys and values."""
        found = self._nearest(_block_keys(ids))
        if found is None:
            return 0, []
        self._entries.move_to_end(found)
        entry = self._entries[found]
        common = min(len(ids) - 1, len(entry.ids))
        if ids[:common] != entry.ids[:common]:
            common = next(place for place in range(common) if ids[place] != entry.ids[place])
        return common, [(keys[:, :common], values[:, :common]) for keys, values in entry.layers]

    def store(self, ids: tuple[int, ...], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keeps per-layer (keys, values) of shape [heads, len(ids), dim]; the tensors must not be views of reused memory."""
        if len(ids) < BLOCK or len(ids) > self.max_tokens:
            return
        keys = _block_keys(ids)
        nearest = self._nearest(keys)
        if nearest is not None:
            known = self._entries[nearest].ids
            if known[: len(ids)] == ids:
                self._entries.move_to_end(nearest)
                return
            if ids[: len(known)] == known:
                self._drop(nearest)
        number, self._next = self._next, self._next + 1
        self._entries[number] = _Entry(ids, keys, layers)
        self.tokens += len(ids)
        for key in keys:
            self._holders.setdefault(key, {})[number] = None
        while self.tokens > self.max_tokens:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self._holders.clear()
        self.tokens = 0

    def _nearest(self, keys: Sequence[int]) -> int | None:
        """The newest entry among those that share the most leading blocks."""
        found = None
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            found = next(reversed(holders))
        return found

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self.tokens -= len(entry.ids)
        for key in entry.keys:
            holders = self._holders[key]
            del holders[number]
            if not holders:
                del self._holders[key]


def _block_keys(ids: Sequence[int]) -> list[int]:
    """A running hash at the end of every whole block; hashes of integers are the same in every process."""
    keys, key = [], 0
    for first in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, *ids[first : first + BLOCK]))
        keys.append(key)
    return keys
