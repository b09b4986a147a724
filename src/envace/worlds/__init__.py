"""Built-in executable worlds on SQLite, to measure in: policies are trained by rehearsing them, never by calling them."""

from collections.abc import Iterable

from envace.errors import UserError
from envace.worlds.bank import Bank
from envace.worlds.base import World
from envace.worlds.calendar import Calendar
from envace.worlds.desk import Desk
from envace.worlds.hotel import Hotel
from envace.worlds.lending import Library
from envace.worlds.orders import Orders

REGISTRY: dict[str, type[World]] = {world.name: world for world in (Orders, Bank, Calendar, Library, Desk, Hotel)}
HELD_OUT = ("hotel",)
"""Worlds that measure transfer: their tasks are refused as training tasks."""

__all__ = ["HELD_OUT", "REGISTRY", "World", "known_worlds", "worlds_of"]


def known_worlds(names: Iterable[str]) -> tuple[str, ...]:
    """``names``, every one of them a built-in world's.

    Raises:
        ValueError: there is no such world, or it is named twice.
    """
    found: list[str] = []
    for name in names:
        if name not in REGISTRY:
            raise ValueError(f"no built-in world {name!r}; there are {', '.join(REGISTRY)}")
        if name in found:
            raise ValueError(f"world {name!r} is named twice")
        found.append(name)
    return tuple(found)


def worlds_of(text: str) -> tuple[str, ...]:
    """The worlds that ``--worlds orders,bank`` names; spaces may stand around the commas.

    Raises:
        UserError: there is no such world, or it is named twice.
    """
    try:
        return known_worlds(name.strip() for name in text.split(","))
    except ValueError as error:
        raise UserError(f"--worlds: {error}") from None
