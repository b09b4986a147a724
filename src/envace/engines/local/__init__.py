"""The local engine: one process, one model, a CPU or one GPU. Any Hugging Face causal LM, full weights or LoRA."""
