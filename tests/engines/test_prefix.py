import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM

from envace.engines.base import TrainingRow
from envace.engines.local import trainer
from envace.engines.local.prefix import can_share
from envace.engines.local.trainer import Trainer, TrainerSettings
from tests.engines.models import SHAPE, build


@pytest.fixture(autouse=True)
def little_padding(monkeypatch):
    """Rows here are short: with the usual padding they would all be one batch."""
    monkeypatch.setitem(trainer.PADDING, "cpu", 12)


def make_row(rng: random.Random, prompt: list[int], size: int) -> TrainingRow:
    mask = [0] * len(prompt) + [1] + [int(rng.random() < 0.7) for _ in range(size - 1)]
    ids = prompt + [rng.randrange(3, 97) for _ in range(size)]
    advantage = rng.uniform(-1, 1)
    return TrainingRow(
        tuple(ids), tuple(mask), tuple(advantage * m for m in mask), tuple(-4.0 * m for m in mask), "act",
        temperature=rng.choice([0.7, 1.0, 1.3]), weight=rng.choice([0.5, 1.0]),
    )  # fmt: skip


def anchored(rows: list[TrainingRow]) -> list[TrainingRow]:
    """A KL coefficient for most, as where the roles' differ."""
    return [replace(row, kl=0.2 * (number % 3)) for number, row in enumerate(rows)]


def rows_of_groups(seed: int = 0) -> list[TrainingRow]:
    """Three groups and a stranger; one row is the beginning of another, one has no sampled token."""
    rng = random.Random(seed)
    rows = [make_row(rng, [rng.randrange(3, 97) for _ in range(9)], 5)]
    for length in (40, 33, 90):
        prompt = [rng.randrange(3, 97) for _ in range(length)]
        rows += [make_row(rng, prompt, rng.randint(2, 40)) for _ in range(5)]
    last = rows[-1]
    cut = len(last.ids) - 1
    rows.append(TrainingRow(last.ids[:cut], last.mask[:cut], last.advantages[:cut], last.logprobs[:cut], "act"))
    rows.append(TrainingRow(last.ids, (0,) * len(last.ids), (0.0,) * len(last.ids), (0.0,) * len(last.ids), "act"))
    rng.shuffle(rows)
    return rows


def step(model, rows, budget=10_000, share=True, **options):
    """Metrics and every parameter's gradient."""
    settings = TrainerSettings(micro_batch_tokens=budget, max_grad_norm=1e9, share_prefixes=share)
    one, kept = Trainer(model, settings, **options), {}

    def keep(lr):
        kept.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)

    one.optimizer.step = keep
    return one.step(rows), kept


def assert_same(got, expected, tolerance=1e-5):
    assert got[0]["loss"] == pytest.approx(expected[0]["loss"], abs=tolerance)
    for key in ("mismatch_mean", "mismatch_max", "clip_share", "kl", "entropy", "cross_entropy"):
        assert got[0].get(key) == pytest.approx(expected[0].get(key), abs=tolerance)
    assert got[1].keys() == expected[1].keys() and got[1]
    for name, gradient in expected[1].items():
        assert torch.allclose(got[1][name], gradient, atol=tolerance), name


@pytest.mark.parametrize("budget", [10_000, 250, 100, 20])
@pytest.mark.parametrize("kind", ["policy", "supervised"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_loss_and_gradient_are_those_of_whole_rows(name, kind, budget):
    rows = [replace(row, objective=kind) for row in rows_of_groups()]
    expected = step(build(name), rows, share=False)
    got = step(build(name), rows, budget)
    assert_same(got, expected)
    assert got[0]["tokens_trained"] == expected[0]["tokens_trained"]
    assert got[0]["tokens_computed"] < 0.75 * expected[0]["tokens_computed"]


@pytest.mark.parametrize("kind", ["exact", "k3"])
def test_the_reference_of_the_kl_shares_too(kind):
    other, passed = build("qwen3"), []
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.02)

    @contextmanager
    def reference():
        yield other

    options = {"reference": reference, "kl": kind}
    expected = step(build("qwen3"), anchored(rows_of_groups()), share=False, **options)
    other.register_forward_pre_hook(
        lambda _, args, kwargs: passed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    got = step(build("qwen3"), anchored(rows_of_groups()), **options)
    assert sum(passed) == got[0]["tokens_computed"]
    assert expected[0]["kl"] > 1e-3
    assert_same(got, expected)
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.parametrize("targets", ["all-linear", ["o_proj"]])
def test_lora(targets):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(3)
        model = peft.get_peft_model(build("qwen3"), peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        return model

    def options(model):
        @contextmanager
        def reference():
            with model.disable_adapter():
                yield model

        return {"reference": reference}

    whole, shared = adapted(), adapted()
    expected = step(whole, anchored(rows_of_groups()), share=False, **options(whole))
    got = step(shared, anchored(rows_of_groups()), **options(shared))
    assert_same(got, expected)
    assert got[0]["tokens_computed"] < 0.75 * expected[0]["tokens_computed"]


def test_bfloat16_is_as_near_as_it_can_be():
    expected = step(build("qwen3"), rows_of_groups(), share=False)[1]
    whole = step(build("qwen3").bfloat16(), rows_of_groups(), share=False)[1]
    shared = step(build("qwen3").bfloat16(), rows_of_groups())[1]

    def distance(gradients):
        return sum(float((gradients[name].float() - one).square().sum()) for name, one in expected.items()) ** 0.5

    assert distance(shared) < 1.3 * distance(whole)


def test_a_step_again_gives_the_same_bits():
    first, again = (step(build("qwen3"), rows_of_groups()) for _ in range(2))
    assert first[0]["loss"] == again[0]["loss"]
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in first[1].items())


def mistral():
    torch.manual_seed(7)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)).eval()


@pytest.mark.parametrize("make", [lambda: build("gemma3"), mistral])
def test_a_sliding_window_computes_whole_rows(make):
    expected, got = (step(make(), rows_of_groups(), share=share) for share in (False, True))
    assert got[0]["tokens_computed"] == expected[0]["tokens_computed"]
    assert_same(got, expected)


def test_gradient_checkpointing_computes_whole_rows():
    expected = step(build("qwen3"), rows_of_groups(), share=False)
    model = build("qwen3")
    model.gradient_checkpointing_enable()
    got = step(model, rows_of_groups())
    assert got[0]["tokens_computed"] == expected[0]["tokens_computed"]
    assert_same(got, expected)


def test_angles_that_depend_on_the_length_cannot_share():
    shape = {**SHAPE, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(**shape, rope_parameters=rope, pad_token_id=0)
    assert not can_share(Phi3ForCausalLM(config).eval())
    assert can_share(build("qwen3"))
