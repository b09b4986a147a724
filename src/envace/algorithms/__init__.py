"""From scored groups to training rows: baselines, advantages, losses. Pure functions that see no tokenizer or engine."""
