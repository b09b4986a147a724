"""A hotel's bookings. Never trained on: it measures transfer."""

from __future__ import annotations

from typing import Any

from envace.worlds.base import ServiceError, World, choice, text, tool


class Hotel(World):
    name = "hotel"
    schema = """
    CREATE TABLE guests (guest_id TEXT PRIMARY KEY, name TEXT);
    CREATE TABLE bookings (booking_id TEXT PRIMARY KEY, guest_id TEXT, room TEXT, status TEXT, meals TEXT);
    """
    tools = (
        tool("find_guest", "Finds a guest by first name.", ("guest_id",), name=text("First name.")),
        tool("list_bookings", "Lists a guest's bookings.", ("guest_id", "bookings"), guest_id=text("Guest id.")),
        tool("get_booking", "Shows one booking.", ("booking_id", "status"), booking_id=text("Booking id.")),
        tool(
            "check_in",
            "Checks a booked guest in.",
            ("booking_id", "status"),
            booking_id=text("Booking id."),
            meals=choice("Meals.", "none", "breakfast", "full"),
        ),
        tool(
            "cancel_booking",
            "Cancels a booking nobody has checked in on.",
            ("booking_id", "status"),
            booking_id=text("Booking id."),
        ),
    )

    def find_guest(self, name: str) -> dict[str, Any]:
        return self.one("guest", "SELECT name, guest_id FROM guests WHERE name = ?", name)

    def list_bookings(self, guest_id: str) -> dict[str, Any]:
        self.one("guest", "SELECT 1 FROM guests WHERE guest_id = ?", guest_id)
        rows = self.all("SELECT room, booking_id FROM bookings WHERE guest_id = ? ORDER BY booking_id", guest_id)
        return {"guest_id": guest_id, "bookings": rows}

    def get_booking(self, booking_id: str) -> dict[str, Any]:
        return self.one("booking", "SELECT booking_id, room, status FROM bookings WHERE booking_id = ?", booking_id)

    def check_in(self, booking_id: str, meals: str) -> dict[str, Any]:
        self._booked(booking_id)
        self.write("UPDATE bookings SET status = 'occupied', meals = ? WHERE booking_id = ?", meals, booking_id)
        return {"booking_id": booking_id, "status": "occupied"}

    def cancel_booking(self, booking_id: str) -> dict[str, Any]:
        self._booked(booking_id)
        self.write("UPDATE bookings SET status = 'cancelled' WHERE booking_id = ?", booking_id)
        return {"booking_id": booking_id, "status": "cancelled"}

    def _booked(self, booking_id: str) -> None:
        status = self.get_booking(booking_id)["status"]
        if status != "booked":
            raise ServiceError(f"ALREADY_{status.upper()}", f"booking {booking_id} is {status}")
