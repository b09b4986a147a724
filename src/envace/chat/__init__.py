"""Between messages and token ids: rendering with a tokenizer's own chat template, and parsing what was sampled."""
