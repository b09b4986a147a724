"""Text that tokenizers accept."""

import re

_REFUSED = re.compile(
    "[\x00\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | end) for plane in range(17) for end in (0xFFFE, 0xFFFF))
    + "]"
)


def clean(text: str) -> str:
    """``text`` with lone surrogates, NUL and noncharacters replaced by U+FFFD."""
    return _REFUSED.sub("\ufffd", text)
