import json

import pytest
import torch

from envace.engines.local.loading import load_policy
from envace.errors import UserError
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
