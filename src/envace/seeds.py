"""Random numbers that depend on what they are for, never on when they are drawn.

Every sampled token's randomness comes from a seed derived from (run, step, task, episode, generation). A run that is
killed and resumed therefore draws the same numbers as one that was never disturbed.
"""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of ``parts``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
