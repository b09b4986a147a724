import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from envace.engines.local.loading import load_policy, resolve
from envace.errors import UserError
from tests.chatml import save_policy
from tests.engines.models import build


def load(path):
    return load_policy(str(path), torch.float32, "cpu")


def test_a_missing_model_is_named_with_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*no such folder"):
        load(tmp_path / "nowhere")


def test_a_folder_that_holds_no_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["config", "weights", "architecture"])
def test_a_damaged_folder_is_one_clear_message(tmp_path, damage):
    build("qwen3").save_pretrained(tmp_path)
    if damage == "config":
        (tmp_path / "config.json").write_text("{")
    elif damage == "weights":
        (tmp_path / "model.safetensors").write_bytes(b"cut off")
    elif damage == "architecture":
        config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "never-heard-of"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot load it"):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    build("qwen3").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tokenizer"):
        load(tmp_path)


def test_a_gguf_file_that_is_cut_off_or_has_no_reader_says_so(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"model\.gguf.*cannot load it"):
        load(tmp_path / "model.gguf")


def test_tensors_that_would_be_random_are_named(tmp_path, caplog):
    save_policy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    lacking = {name: tensor for name, tensor in model.state_dict().items() if "layers.0.self_attn.q_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=lacking)
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.self_attn\.q_proj"):
        load(tmp_path)
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | {"adapter.weight": torch.zeros(3)})
    load(tmp_path)
    assert "hold 1 tensors that config.json has no place for: adapter.weight" in caplog.text
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(UserError, match=r"cannot load it|other shapes"):
        load(tmp_path)


def test_a_run_is_its_newest_whole_checkpoint(tmp_path):
    for name in ("step-000009", "step-000010", "step-000011.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path / "checkpoints" / "step-000010"
