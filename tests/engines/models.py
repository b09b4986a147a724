"""Small random models of several architectures, for tests."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(7)
    if name == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8, query_pre_attn_scalar=8))
    return model.eval()
