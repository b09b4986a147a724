"""A byte-level tokenizer with the tiny policy's chat template, for tests that need no real vocabulary."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = Path(__file__).parents[1] / "recipes" / "tiny" / "chat_template.jinja"


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE.read_text()
    return fast


def save_policy(folder: Path, size: int = 16, intermediate: int = 16, layers: int = 1, scale: float = 0.02) -> None:
    """A random model of heads of 16 dimensions and this tokenizer, as a Hugging Face folder."""
    torch.manual_seed(0)
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=size, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=size // 16, num_key_value_heads=size // 16, head_dim=16, initializer_range=scale,
        eos_token_id=words.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
