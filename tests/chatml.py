"""A byte-level tokenizer with the tiny policy's chat template, for tests that need no real vocabulary."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

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
