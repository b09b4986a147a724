import asyncio
import random

import pytest
import torch

from envace.engines.base import Sample, SamplingParams
from envace.engines.local.sampler import LocalSampler
from tests.engines.models import build

MODELS = ["qwen3", "llama", "gemma3"]


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, 97) for _ in range(rng.randint(1, 50))) for _ in range(count)]


def logprobs_one_by_one(model, prompt, completion, temperature=1.0):
    """Of a plain full forward pass over one unpadded row."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("name", MODELS)
async def test_greedy_equals_generate_one_by_one(name):
    model = build(name)
    sampler = LocalSampler(model, max_batch=5)
    asked = prompts(12)
    got = await asyncio.gather(*(sampler.sample(p, SamplingParams(max_tokens=12, temperature=0)) for p in asked))
    for prompt, sample in zip(asked, got, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert sample.completion_ids == tuple(expected[0, len(prompt) :].tolist())
        assert sample.stop_reason == "length"


@pytest.mark.parametrize("name", MODELS)
async def test_logprobs_with_admission_midway_and_growing_contexts(name):
    model = build(name)
    sampler = LocalSampler(model, max_batch=6)

    async def conversation(number: int) -> list[tuple[tuple[int, ...], Sample]]:
        rng, context, made = random.Random(number), prompts(1, number)[0], []
        for turn in range(4):
            sample = await sampler.sample(
                context,
                SamplingParams(
                    max_tokens=rng.randint(1, 25), temperature=0.8, seed=100 * number + turn, stop_ids=(5, 6)
                ),
            )
            made.append((context, sample))
            context = (*context, *sample.completion_ids, *(rng.randrange(3, 97) for _ in range(rng.randint(1, 9))))
        return made

    conversations = await asyncio.gather(*(conversation(number) for number in range(15)))
    stats = sampler.stats
    for prompt, sample in (pair for made in conversations for pair in made):
        expected = logprobs_one_by_one(model, prompt, sample.completion_ids, 0.8)
        assert sample.logprobs == pytest.approx(expected, abs=2e-4)
        assert (sample.stop_reason == "stop") == (sample.completion_ids[-1] in (5, 6))
    assert stats.prefill_tokens < 0.8 * stats.prompt_tokens  # earlier turns were not computed again


async def test_a_seed_gives_the_same_tokens_in_any_company():
    model = build("qwen3")
    prompt, params = prompts(1)[0], SamplingParams(max_tokens=30, seed=42)
    alone = await LocalSampler(model).sample(prompt, params)
    sampler = LocalSampler(model, max_batch=4)
    company = [sampler.sample(p, SamplingParams(max_tokens=9, seed=n)) for n, p in enumerate(prompts(9, 3))]
    among = (await asyncio.gather(*company, sampler.sample(prompt, params)))[-1]
    assert among.completion_ids == alone.completion_ids
    other = await LocalSampler(model).sample(prompt, SamplingParams(max_tokens=30, seed=43))
    assert other.completion_ids != alone.completion_ids


async def test_the_same_schedule_is_the_same_to_the_last_bit():
    async def once() -> list[Sample]:
        sampler = LocalSampler(build("qwen3"), max_batch=3)
        return await asyncio.gather(
            *(sampler.sample(p, SamplingParams(max_tokens=9, seed=n)) for n, p in enumerate(prompts(8)))
        )

    assert await once() == await once()


async def test_draws_follow_the_distribution():
    model = build("llama")
    sampler, prompt = LocalSampler(model, max_batch=64), (3, 4, 5)
    got = await asyncio.gather(*(sampler.sample(prompt, SamplingParams(max_tokens=1, seed=n)) for n in range(4000)))
    counts = torch.bincount(torch.tensor([s.completion_ids[0] for s in got]), minlength=97) / 4000
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    # The standard error of a share of 4000 draws is at most 0.008.
    assert (counts - expected).abs().max() < 0.03


async def test_top_k_and_top_p_keep_only_likely_tokens():
    model = build("llama")
    with torch.no_grad():
        probabilities = model(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1)
    ordered = probabilities.argsort(descending=True).tolist()
    sampler = LocalSampler(model)
    top_k = await asyncio.gather(*(sampler.sample((3, 4, 5), SamplingParams(1, top_k=3, seed=n)) for n in range(200)))
    assert {s.completion_ids[0] for s in top_k} == set(ordered[:3])
    kept, total = set(), 0.0
    for token in ordered:
        kept.add(token)
        total += probabilities[token].item()
        if total >= 0.5:
            break
    top_p = await asyncio.gather(*(sampler.sample((3, 4, 5), SamplingParams(1, top_p=0.5, seed=n)) for n in range(400)))
    assert {s.completion_ids[0] for s in top_p} <= kept


async def test_a_cancelled_request_leaves_the_others_alone():
    model = build("qwen3")
    sampler = LocalSampler(model)
    prompt = prompts(1)[0]
    expected = (await sampler.sample(prompt, SamplingParams(max_tokens=40, seed=1))).completion_ids
    gone = asyncio.ensure_future(sampler.sample((9, 9, 9), SamplingParams(max_tokens=400)))
    stays = asyncio.ensure_future(sampler.sample(prompt, SamplingParams(max_tokens=40, seed=1)))
    for _ in range(5):
        await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).completion_ids == expected
    assert sampler.stats.decode_tokens < 200


async def test_a_failing_pass_fails_its_requests_and_not_the_sampler():
    model = build("qwen3")
    sampler = LocalSampler(model)
    with pytest.raises(IndexError):
        await sampler.sample((500,), SamplingParams(max_tokens=3))
    assert len((await sampler.sample((5,), SamplingParams(max_tokens=3))).completion_ids) == 3


async def test_a_full_context_ends_with_length():
    sampler = LocalSampler(build("qwen3"), max_context=10)
    sample = await sampler.sample((3,) * 8, SamplingParams(max_tokens=30))
    assert (len(sample.completion_ids), sample.stop_reason) == (2, "length")
    assert await sampler.sample((3,) * 10, SamplingParams(max_tokens=30)) == Sample((), (), "length", 0)
