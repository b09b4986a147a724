import math
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from envace.engines.base import TrainingRow
from envace.engines.local.engine import LocalEngine, LocalEngineSettings, LoraSettings
from envace.engines.local.trainer import Trainer, TrainerSettings
from envace.errors import UserError
from tests.engines.models import build
from tokenizers import Tokenizer, models


def row(ids, mask, advantages=None, role="act", temperature=1.0, weight=1.0, logprobs=None) -> TrainingRow:
    zeros = (0.0,) * len(ids)
    return TrainingRow(tuple(ids), tuple(mask), advantages or zeros, logprobs or zeros, role, temperature, weight)


def random_rows(count: int, seed: int = 0) -> list[TrainingRow]:
    rng, rows = random.Random(seed), []
    for _ in range(count):
        size, begin = rng.randint(6, 40), rng.randint(1, 5)
        advantage = rng.uniform(-1, 1)
        mask = (0,) * begin + (1,) * (size - begin)
        rows.append(
            row(
                [rng.randrange(3, 97) for _ in range(size)], mask,
                advantages=tuple(advantage * m for m in mask), logprobs=tuple(-4.0 * m for m in mask),
            )
        )  # fmt: skip
    return rows


def gradient(rows, budget=10_000, **options) -> tuple[dict[str, float], torch.Tensor]:
    model = build("qwen3")
    trainer = Trainer(model, TrainerSettings(lr=1e-3, micro_batch_tokens=budget, max_grad_norm=1e9), **options)
    kept: list[torch.Tensor] = []
    trainer.optimizer.step = lambda lr: kept.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return trainer.step(rows), kept[0]


def test_merged_rows_give_the_loss_and_gradient_of_unmerged_rows():
    rng = random.Random(1)
    ids = [rng.randrange(3, 97) for _ in range(30)]
    # Two generations of a growing context: tokens 8..13 and 20..29 were sampled.
    first = row(ids[:14], [0] * 8 + [1] * 6, (0.0,) * 8 + (0.7,) * 6, logprobs=(0.0,) * 8 + (-4.2,) * 6)
    second = row(ids, [0] * 20 + [1] * 10, (0.0,) * 20 + (-0.4,) * 10, logprobs=(0.0,) * 20 + (-4.4,) * 10)
    merged = row(
        ids, [0] * 8 + [1] * 6 + [0] * 6 + [1] * 10, (0.0,) * 8 + (0.7,) * 6 + (0.0,) * 6 + (-0.4,) * 10,
        logprobs=(0.0,) * 8 + (-4.2,) * 6 + (0.0,) * 6 + (-4.4,) * 10,
    )  # fmt: skip
    apart, gradient_apart = gradient([first, second])
    together, gradient_together = gradient([merged])
    assert together["loss"] == pytest.approx(apart["loss"], abs=1e-5)
    assert torch.allclose(gradient_together, gradient_apart, atol=1e-5)
    assert together["tokens_trained"] == apart["tokens_trained"] == 16
    assert together["tokens_computed"] < apart["tokens_computed"]


def test_the_cut_into_micro_batches_does_not_change_the_step():
    rows = random_rows(12)
    whole, expected = gradient(rows)
    cut, got = gradient(rows, budget=60)
    assert cut["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3"])
def test_loss_equals_a_plain_computation_over_single_rows(name):
    rows, model, total, entropy, tokens = random_rows(5), build(name), 0.0, 0.0, 0
    for item in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([item.ids])).logits[0].log_softmax(-1)
        for position in range(1, len(item.ids)):
            if item.mask[position]:
                logprob = logprobs[position - 1, item.ids[position]]
                ratio = float((logprob - item.logprobs[position]).exp())
                advantage = item.advantages[position]
                total -= min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
                entropy -= float(logprob)
                tokens += 1
    metrics = Trainer(model, TrainerSettings(lr=1e-3), clip_high=0.3).step(rows)
    assert metrics["loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy / tokens, abs=1e-5)


def test_supervised_rows_have_a_mean_of_their_own():
    # Two policy rows and one supervised row at weight 0.3: 0.3 times its mean cross-entropy is added.
    rows, model = random_rows(3), build("qwen3")
    with torch.no_grad():
        logs = model(torch.tensor([rows[2].ids])).logits[0].log_softmax(-1)
    targets = [place for place, sampled in enumerate(rows[2].mask) if sampled]
    expected = -sum(float(logs[place - 1, rows[2].ids[place]]) for place in targets) / len(targets)
    alone, gradient_alone = gradient(rows[:2])
    taught = replace(rows[2], objective="supervised")
    both, gradient_both = gradient([*rows[:2], replace(taught, weight=0.3)])
    assert both["cross_entropy"] == pytest.approx(expected, abs=1e-5)
    assert both["loss"] == pytest.approx(alone["loss"] + 0.3 * expected, abs=1e-5)
    for key in ("mismatch_mean", "mismatch_max", "clip_share", "entropy"):
        assert both[key] == pytest.approx(alone[key], abs=1e-5)
    assert torch.allclose(gradient_both, gradient_alone + 0.3 * gradient([taught])[1], atol=1e-5)


@pytest.mark.parametrize("kind", ["exact", "k3"])
def test_the_kl_is_that_of_the_rows_with_a_coefficient(kind):
    start = build("qwen3")
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    @contextmanager
    def reference():
        yield start

    rows = [replace(one, kl=coefficient) for one, coefficient in zip(random_rows(3), (0.2, 0.0, 0.6), strict=True)]
    model, values, penalty = build("qwen3"), [], 0.0
    for one in rows:
        with torch.no_grad():
            policy, other = (of(torch.tensor([one.ids])).logits[0].log_softmax(-1) for of in (model, start))
        for place in range(1, len(one.ids)):
            if one.mask[place]:
                p, q, token = policy[place - 1], other[place - 1], one.ids[place]
                exact = float((p.exp() * (p - q)).sum())
                gap = float(q[token] - p[token])
                value = exact if kind == "exact" else math.exp(gap) - gap - 1
                values += [value] if one.kl else []
                penalty += one.kl * value
    metrics, _ = gradient(rows, kl=kind, reference=reference)
    assert metrics["kl"] == pytest.approx(sum(values) / len(values), abs=1e-5)
    plain, _ = gradient([replace(one, kl=0.0) for one in rows])
    assert metrics["loss"] == pytest.approx(plain["loss"] + penalty / len(values), abs=1e-5)
    assert penalty / len(values) > 1e-3


def test_a_row_without_a_sampled_token_changes_nothing():
    rows = random_rows(3)
    silent = row([5] * 60, [0] * 60)
    expected, got = gradient(rows), gradient([*rows, silent], budget=60)
    assert got[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
    assert torch.allclose(got[1], expected[1], atol=1e-5)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    rows, model = random_rows(2), build("qwen3")
    before = [parameter.clone() for parameter in model.parameters()]
    broken = TrainingRow(**{**rows[0].__dict__, "advantages": (float("inf"),) * len(rows[0].ids)})
    metrics = Trainer(model, TrainerSettings(lr=1e-1)).step([broken, rows[1]])
    assert metrics["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_row_weight_scales_its_loss_and_not_the_token_count():
    rows = random_rows(2)
    halved = [TrainingRow(**{**item.__dict__, "weight": 0.5}) for item in rows]
    assert gradient(halved)[0]["loss"] == pytest.approx(gradient(rows)[0]["loss"] / 2, rel=1e-5)


def test_warm_up_then_cosine_to_a_tenth():
    trainer = Trainer(build("qwen3"), TrainerSettings(lr=1.0, warmup_steps=4, decay_steps=24))
    assert [trainer.learning_rate(step) for step in (0, 3, 4, 14, 24, 99)] == pytest.approx(
        [0.25, 1, 1, 0.55, 0.1, 0.1]
    )


@pytest.fixture
def folder(tmp_path):
    build("qwen3").save_pretrained(tmp_path / "model")
    vocabulary = {f"t{number}": number for number in range(97)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), eos_token="t1"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4)])
def test_saved_and_loaded_goes_on_bit_for_bit(folder, tmp_path, lora):
    settings = LocalEngineSettings(lr=1e-2, lora=lora, device="cpu")
    undisturbed = LocalEngine(str(folder), settings)
    undisturbed.update(random_rows(4, 1))
    undisturbed.save(tmp_path / "saved")
    resumed = LocalEngine(str(folder), settings)
    resumed.load(tmp_path / "saved")
    for engine in (undisturbed, resumed):
        engine.update(random_rows(4, 2))
    assert resumed.policy_version == undisturbed.policy_version == 2
    for (name, expected), (_, got) in zip(
        undisturbed.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, got), name


def test_lora_trains_adapters_alone_and_saves_them_merged(folder, tmp_path):
    engine = LocalEngine(str(folder), LocalEngineSettings(lr=1e-1, lora=LoraSettings(r=4), device="cpu"))
    trainable = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    for step in range(3):
        engine.update(random_rows(4, step))
    engine.save(tmp_path / "saved")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = engine.model(ids).logits
        merged = LocalEngine(str(tmp_path / "saved"), LocalEngineSettings(device="cpu")).model(ids).logits
        start = build("qwen3")(ids).logits
    assert torch.allclose(merged, expected, atol=1e-4)
    assert not torch.allclose(merged, start, atol=1e-2)
    assert (tmp_path / "saved" / "adapter" / "adapter_model.safetensors").is_file()


def test_supervised_updates_lower_the_loss(folder):
    engine = LocalEngine(str(folder), LocalEngineSettings(lr=1e-2, device="cpu"))
    rows = [replace(one, objective="supervised") for one in random_rows(4)]
    losses = [engine.update(rows).metrics["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_weight_of_a_role_leaves_its_kl_alone():
    start = build("qwen3")
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    @contextmanager
    def reference():
        yield start

    def pull(weight: float) -> torch.Tensor:
        """What the KL adds to the gradient of rows of this weight."""
        rows = [replace(one, weight=weight) for one in random_rows(4)]
        anchored = [replace(one, kl=0.3) for one in rows]
        return gradient(anchored, reference=reference)[1] - gradient(rows)[1]

    assert float(pull(0.1).norm()) > 1e-3
    assert torch.allclose(pull(0.1), pull(1.0), atol=1e-5)


def test_the_kl_pulls_only_rows_that_have_a_coefficient_and_in_its_proportion():
    start = build("qwen3")
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    @contextmanager
    def reference():
        yield start

    def pull(first: float, second: float) -> torch.Tensor:
        one, two = random_rows(2)
        anchored = [replace(one, kl=first), replace(two, kl=second)]
        return gradient(anchored, reference=reference)[1] - gradient([one, two], reference=reference)[1]

    assert float(pull(0.2, 0.0).norm()) > 1e-3
    assert not torch.allclose(pull(0.2, 0.0), pull(0.0, 0.2), atol=1e-4)
    # The mean is over the tokens of the rows that have one.
    first, second = (sum(one.mask) for one in random_rows(2))
    expected = (first * pull(0.2, 0.0) + second * 3 * pull(0.0, 0.2)) / (first + second)
    assert torch.allclose(pull(0.2, 0.6), expected, atol=1e-5)


def test_an_anchor_row_has_its_kl_alone():
    start = build("qwen3")
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    @contextmanager
    def reference():
        yield start

    one, two, other = random_rows(3)
    anchor = replace(other, kl=0.4, objective="anchor")
    alone, gradient_alone = gradient([one, two])
    held, gradient_held = gradient([anchor], reference=reference)
    both, gradient_both = gradient([one, anchor, two], reference=reference)
    assert held["loss"] == pytest.approx(0.4 * held["kl"], abs=1e-6)
    assert both["loss"] == pytest.approx(alone["loss"] + 0.4 * held["kl"], abs=1e-5)
    assert torch.allclose(gradient_both, gradient_alone + gradient_held, atol=1e-5)
    for key in ("mismatch_mean", "mismatch_max", "clip_share", "entropy"):
        assert both[key] == pytest.approx(alone[key], abs=1e-5)
        assert key not in held


def test_a_kl_without_the_start_policy_is_refused():
    with pytest.raises(ValueError, match="start policy"):
        gradient([replace(one, kl=0.1) for one in random_rows(2)])


def test_kl_is_zero_at_the_start_and_positive_after_a_step(folder):
    engine = LocalEngine(str(folder), LocalEngineSettings(lr=1e-2, device="cpu"), keep_start=True)
    rows = [replace(one, kl=0.5) for one in random_rows(4)]
    kls = [engine.update(rows).metrics["kl"] for _ in range(2)]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[1] > 1e-4


def test_the_ratio_of_whole_generations():
    # Two generations in one row, tokens 3-4 and 7; the expected loss from the model's own logits, generation by generation.
    ids, mask = [5, 9, 11, 20, 21, 30, 31, 40], [0, 0, 0, 1, 1, 0, 0, 1]
    with torch.no_grad():
        logs = torch.log_softmax(build("qwen3")(torch.tensor([ids])).logits[0], dim=-1)
    now = [float(logs[place - 1, ids[place]]) for place in (3, 4, 7)]
    old = [now[0] - 0.5, now[1] + 0.3, now[2] - 0.6]
    rows = [
        row(ids, mask, (0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0), logprobs=(0.0, 0.0, 0.0, *old[:2], 0.0, 0.0, old[2]))
    ]
    # First: mean log-ratio 0.1, not clipped (its first token alone, 0.5, would be). Second: 0.6, clipped to 1.2.
    expected = -(2 * math.exp(0.1) + 1.2) / 3
    metrics, _ = gradient(rows, ratio="sequence")
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["clip_share"] == pytest.approx(1 / 3)
    by_token = -(1.2 + math.exp(-0.3) + 1.2) / 3
    assert gradient(rows)[0]["loss"] == pytest.approx(by_token, abs=1e-5)


@pytest.mark.parametrize("damage", ["state", "weights"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(folder, tmp_path, damage):
    engine = LocalEngine(str(folder), LocalEngineSettings(device="cpu"))
    engine.save(tmp_path / "saved")
    file = tmp_path / "saved" / ("trainer_state.pt" if damage == "state" else "model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"saved: a damaged checkpoint .*; remove that folder"):
        engine.load(tmp_path / "saved")


@pytest.mark.parametrize("device", ["foo", "cuda:99", "cpu:x", "meta:3:1", "mps", ""])
def test_a_device_that_is_not_there_is_named(folder, device):
    with pytest.raises(UserError, match=rf"engine\.device={device}: "):
        LocalEngine(str(folder), LocalEngineSettings(device=device))


@pytest.mark.parametrize("wrong", [{"betas": (2, 3)}, {"betas": (0.9, 1)}, {"threads": 100_000}, {"lr": 1e300}])
def test_settings_that_no_machine_or_optimizer_takes_are_refused(wrong):
    with pytest.raises(ValidationError):
        LocalEngineSettings.model_validate(wrong)
