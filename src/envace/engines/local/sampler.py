"""Continuous batching for any Hugging Face causal LM with an ordinary key/value cache.

Requests of both roles share one batch; a new one is admitted while others decode, and whatever an earlier request has
already computed of its prompt is reused. One asyncio task drives the model, with no thread and no clock, so the order of
things, and with it every number, is the same in every run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from envace.engines.base import Sample, SamplingParams
from envace.engines.local.cache import PrefixCache, RowCache, prefilled


@dataclass
class SamplerStats:
    """Counters since the sampler was made. ``prompt_tokens`` were asked for, ``prefill_tokens`` were computed."""

    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    model_seconds: float = 0.0
    """Inside the model's forward passes."""
    seconds: float = 0.0
    """With work at hand, the event loop's turns between passes included."""


@dataclass
class _Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    future: asyncio.Future[Sample]
    draws: list[float]
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class LocalSampler:
    """Implements ``engines.base.Sampler`` over a model in this process.

    Args:
        model: a causal LM in evaluation mode during sampling.
        max_batch: rows decoded together.
        max_context: prompt and completion tokens of one row; a longer completion ends with ``length``.
        prefix_tokens: how many tokens of finished contexts are kept for reuse; 0 turns reuse off.
        prefill_tokens: at most so many tokens are prefilled in one forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int = 64,
        max_context: int = 20_000,
        prefix_tokens: int = 200_000,
        prefill_tokens: int = 8192,
    ) -> None:
        self.model = model
        self.stats = SamplerStats()
        self.policy_version = 0
        self._max_context = max_context
        self._prefill_tokens = prefill_tokens
        self._device = next(model.parameters()).device
        self._layers = model.config.get_text_config().num_hidden_layers
        self._rows = RowCache(max_batch)
        self._active: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._admitting: list[_Request] = []
        self._prefixes = PrefixCache(prefix_tokens)
        self._task: asyncio.Task[None] | None = None

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Sample:
        """Draws one completion.

        Raises:
            ValueError: an empty prompt.
        """
        prompt = tuple(prompt_ids)
        if not prompt:
            raise ValueError("an empty prompt")
        limit = min(params.max_tokens, self._max_context - len(prompt))
        if limit <= 0:
            return Sample((), (), "length", self.policy_version)
        loop = asyncio.get_running_loop()
        draws = np.random.Generator(np.random.Philox(params.seed)).random(limit, dtype=np.float64).tolist()
        request = _Request(prompt, params, loop.create_future(), draws, limit)
        self._waiting.append(request)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(prompt)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return await request.future

    def begin_version(self, version: int) -> None:
        """Forgets everything computed with other weights, and frees its memory. No request may be in flight."""
        self._prefixes.clear()
        self._rows = RowCache(self._rows.max_rows, self._rows.columns)
        self.policy_version = version

    async def _run(self) -> None:
        self.model.eval()
        try:
            # Whoever asked in this turn of the event loop gets a chance to queue before the first pass.
            await asyncio.sleep(0)
            while self._waiting or self._active:
                started = time.perf_counter()
                with torch.inference_mode():
                    self._drop_cancelled()
                    self._admit()
                    if self._active:
                        self._decode()
                await asyncio.sleep(0)
                self.stats.seconds += time.perf_counter() - started
        except Exception as error:
            # A failed pass fails the requests in it; the sampler itself stays usable.
            for request in [*self._admitting, *self._active.values(), *self._waiting]:
                if not request.future.done():
                    request.future.set_exception(error)
            self._admitting, self._active, self._waiting = [], {}, deque()
            self._rows = RowCache(self._rows.max_rows)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(request for request in self._waiting if not request.future.done())
        for row in [row for row, request in self._active.items() if request.future.done()]:
            self._release(row)

    def _release(self, row: int) -> None:
        self._rows.release(row)
        del self._active[row]

    def _admit(self) -> None:
        free = self._rows.max_rows - len(self._active)
        batch = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not batch:
            return
        self._admitting = batch
        unique: dict[tuple[int, ...], list[_Request]] = {}
        for request in batch:
            unique.setdefault(request.prompt, []).append(request)
        found = {prompt: self._prefixes.find(prompt) for prompt in unique}
        # Prompts with a similar number of tokens to compute go together; within a pass all are as long as the longest.
        order = sorted(unique, key=lambda prompt: len(prompt) - found[prompt][0])
        while order:
            new = len(order[-1]) - found[order[-1]][0]
            chosen = [order.pop()]
            while order and 2 * (len(order[-1]) - found[order[-1]][0]) >= new:
                if new * (len(chosen) + 1) > self._prefill_tokens:
                    break
                chosen.append(order.pop())
            logits = self._prefill(chosen, [found[prompt] for prompt in chosen], new, unique)
            # Identical prompts were computed once and fan out here.
            repeats = [row for row, prompt in enumerate(chosen) for _ in unique[prompt]]
            requests = [request for prompt in chosen for request in unique[prompt]]
            self._draw(logits[repeats], requests)
        self._finish_those_done()

    def _prefill(
        self,
        prompts: list[tuple[int, ...]],
        found: list[tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]],
        new: int,
        unique: dict[tuple[int, ...], list[_Request]],
    ) -> torch.Tensor:
        """One pass over the last ``new`` tokens of every prompt; returns next-token logits [prompts, vocabulary].

        A prompt with more of it cached than the others computes a few cached tokens again, so no row has a hole.
        """
        past = [max(0, len(prompt) - new) for prompt in prompts]
        width = max(past)
        ids = torch.zeros(len(prompts), new, dtype=torch.long)
        positions = torch.zeros(len(prompts), new, dtype=torch.long)
        mask = torch.zeros(len(prompts), width + new, dtype=torch.long)
        for row, (prompt, kept) in enumerate(zip(prompts, past, strict=True)):
            tail = len(prompt) - kept
            ids[row, new - tail :] = torch.tensor(prompt[kept:])
            positions[row, new - tail :] = torch.arange(kept, len(prompt))
            mask[row, width + new - len(prompt) :] = 1
        cache = prefilled([layers for _, layers in found], past, new)
        started = time.perf_counter()
        output = self.model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.stats.model_seconds += time.perf_counter() - started
        self.stats.prefill_tokens += new * len(prompts)
        for row, prompt in enumerate(prompts):
            size = len(prompt)
            layers = [(layer.keys[row, :, -size:], layer.values[row, :, -size:]) for layer in cache.layers]
            for request in unique[prompt]:
                self._active[self._rows.add(layers, size)] = request
            if self._prefixes.max_tokens and 2 * past[row] < size:
                # Mostly new: others may share it. A next turn's prompt is kept when its completion is done.
                self._prefixes.store(prompt, [(keys.clone(), values.clone()) for keys, values in layers])
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _decode(self) -> None:
        """One token for every active row."""
        for last, row in self._rows.compact():
            self._active[row] = self._active.pop(last)
        requests = [self._active[row] for row in range(len(self._active))]
        self._rows.ensure_column()
        ids = torch.tensor([request.tokens[-1] for request in requests])[:, None]
        positions = torch.tensor(self._rows.lengths)[:, None]
        started = time.perf_counter()
        output = self.model(
            input_ids=ids.to(self._device),
            attention_mask=self._rows.mask().to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=self._rows.view(self._layers),
            use_cache=True,
        )
        self.stats.model_seconds += time.perf_counter() - started
        self.stats.steps += 1
        self.stats.decode_tokens += len(requests)
        self._rows.advance()
        self._draw(output.logits[:, -1], requests)
        self._finish_those_done()

    def _draw(self, logits: torch.Tensor, requests: Sequence[_Request]) -> None:
        """Appends one token to each request, by inverting the cumulative distribution at its own random number."""
        logits = logits.float()
        temperatures = [request.params.temperature for request in requests]
        greedy, scaled = 0 in temperatures, logits
        if set(temperatures) != {1.0}:
            temperature = torch.tensor(temperatures, device=logits.device)
            scaled = logits / torch.where(temperature > 0, temperature, torch.ones_like(temperature))[:, None]
        if any(request.params.top_p < 1 or request.params.top_k > 0 for request in requests):
            scaled = _truncate(scaled, requests)
        logprobs = torch.log_softmax(scaled, dim=-1)
        draws = torch.tensor(
            [request.draws[len(request.tokens)] for request in requests], dtype=torch.float64, device=logits.device
        )
        cumulative = logprobs.exp().double().cumsum_(dim=-1)
        tokens = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
        if greedy:
            tokens = torch.where(temperature > 0, tokens, logits.argmax(dim=-1))
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        for request, token, logprob in zip(requests, tokens.tolist(), chosen.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)

    def _finish_those_done(self) -> None:
        for row, request in list(self._active.items()):
            stopped = request.tokens[-1] in request.params.stop_ids
            if stopped or len(request.tokens) >= request.limit:
                self._finish(row, request, stopped)

    def _finish(self, row: int, request: _Request, stopped: bool) -> None:
        if self._prefixes.max_tokens:
            # The last token's keys were never computed; the next request of this conversation computes them.
            known = (request.prompt + tuple(request.tokens))[: self._rows.lengths[row]]
            self._prefixes.store(known, self._rows.row(row))
        self._release(row)
        request.future.set_result(
            Sample(
                tuple(request.tokens),
                tuple(request.logprobs),
                "stop" if stopped else "length",
                self.policy_version,
            )
        )


def _truncate(scaled: torch.Tensor, requests: Sequence[_Request]) -> torch.Tensor:
    """Top-k, then top-p, per row: tokens outside get a log-probability of minus infinity."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)[None, :]
    size = scaled.shape[-1]
    top_k = torch.tensor([request.params.top_k or size for request in requests], device=scaled.device)
    top_p = torch.tensor([request.params.top_p for request in requests], device=scaled.device)
    ordered = ordered.masked_fill(ranks >= top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p[:, None], float("-inf"))
    return torch.full_like(scaled, float("-inf")).scatter(1, order, ordered)
