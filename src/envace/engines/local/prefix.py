"""Keys and values of prompts that several training rows share, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


def can_share(model: Any) -> bool:
    """Whether ``model`` (in evaluation mode) computes the same from a prefix's keys and values as from the whole row.

    That takes plain keys and values in every layer, and rotary angles that do not depend on a pass's length.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    ropes = [str(part.get("rope_type", part.get("type"))) for part in parts]
    if kinds != {"full_attention"} or any("dynamic" in kind or kind == "longrope" for kind in ropes):
        return False
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
        return False
    cache = DynamicCache(config=config)
    if not _plain(cache):
        return False
    two = torch.arange(2, device=next(model.parameters()).device)[None]
    try:
        with torch.no_grad():
            output = model(
                input_ids=two, attention_mask=two * 0 + 1, position_ids=two, past_key_values=cache, use_cache=True
            )
    except (TypeError, ValueError):
        return False
    filled = len(cache.layers) == config.num_hidden_layers and all(
        layer.get_seq_length() == 2 for layer in cache.layers
    )
    return output.past_key_values is cache and _plain(cache) and filled


def _plain(cache: DynamicCache) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache.layers)


class SharedPrefixes:
    """The keys and values of some prefixes: a pass over rows that follow them leaves their gradients here.

    They are cut off from the pass that computed them, so that each pass over rows can be run backward on its own and free
    its memory; ``backward`` then takes the sum of their gradients through the prefixes' own pass.
    """

    def __init__(self, model: Any, prefixes: Sequence[Sequence[int]]) -> None:
        self._config = model.config.get_text_config(decoder=True)
        device = next(model.parameters()).device
        self._width = max(map(len, prefixes))
        self._sizes = torch.tensor([len(prefix) for prefix in prefixes], device=device)
        # Pads lie on the right, where no token of the prefix sees them; for what follows they are masked.
        padded = [(*prefix, *(0,) * (self._width - len(prefix))) for prefix in prefixes]
        cache = DynamicCache(config=self._config)
        model(input_ids=torch.tensor(padded, device=device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._computed: list[Tensor] = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        self._leaves = [part.detach().requires_grad_(part.requires_grad) for part in self._computed]

    def past(self, numbers: Tensor, width: int) -> dict[str, Any]:
        """The model's arguments for a pass over ``width`` more tokens of rows that follow the prefixes ``numbers``."""
        sizes = self._sizes[numbers]
        cache = DynamicCache(config=self._config)
        parts = [part.index_select(0, numbers) for part in self._leaves]
        for number, layer in enumerate(cache.layers):
            layer.update(parts[2 * number], parts[2 * number + 1])
        columns = torch.arange(self._width + width, device=numbers.device)
        return {
            "past_key_values": cache,
            "use_cache": True,
            "attention_mask": ((columns < sizes[:, None]) | (columns >= self._width)).long(),
            "position_ids": sizes[:, None] + columns[:width],
        }

    def backward(self) -> None:
        pairs = [
            (part, leaf.grad) for part, leaf in zip(self._computed, self._leaves, strict=True) if leaf.grad is not None
        ]
        if pairs:
            parts, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(parts, gradients)
