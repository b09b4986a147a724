"""Cache keys for frozen data that cannot be hashed, because somewhere in it is a dictionary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Same(Generic[T]):
    """Equal to another exactly where both hold the one object, which it keeps alive."""

    value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
