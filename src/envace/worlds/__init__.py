"""Built-in executable worlds on SQLite, to measure in: policies are trained by rehearsing them, never by calling them."""

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

__all__ = ["HELD_OUT", "REGISTRY", "World"]
