"""People's calendars."""

from __future__ import annotations

from typing import Any

from envace.worlds.base import ServiceError, World, choice, text, tool, whole

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


class Calendar(World):
    name = "calendar"
    schema = """
    CREATE TABLE people (person_id TEXT PRIMARY KEY, name TEXT);
    CREATE TABLE events (event_id TEXT PRIMARY KEY, person_id TEXT, title TEXT, day TEXT, hour INTEGER, status TEXT);
    """
    tools = (
        tool("find_person", "Finds a person by first name.", ("person_id",), name=text("First name.")),
        tool("list_events", "Lists a person's events.", ("person_id", "events"), person_id=text("Person id.")),
        tool("get_event", "Shows one event.", ("event_id", "day", "hour", "status"), event_id=text("Event id.")),
        tool(
            "move_event",
            "Moves a planned event to a free slot.",
            ("event_id", "day", "hour"),
            event_id=text("Event id."),
            day=choice("New day.", *DAYS),
            hour=whole("New hour.", 8, 18),
        ),
        tool("cancel_event", "Cancels a planned event.", ("event_id", "status"), event_id=text("Event id.")),
    )

    def find_person(self, name: str) -> dict[str, Any]:
        return self.one("person", "SELECT name, person_id FROM people WHERE name = ?", name)

    def list_events(self, person_id: str) -> dict[str, Any]:
        self.one("person", "SELECT 1 FROM people WHERE person_id = ?", person_id)
        rows = self.all("SELECT title, event_id FROM events WHERE person_id = ? ORDER BY event_id", person_id)
        return {"person_id": person_id, "events": rows}

    def get_event(self, event_id: str) -> dict[str, Any]:
        return self.one("event", "SELECT event_id, title, day, hour, status FROM events WHERE event_id = ?", event_id)

    def move_event(self, event_id: str, day: str, hour: int) -> dict[str, Any]:
        self._planned(event_id)
        taken = self.all(
            "SELECT o.event_id FROM events o JOIN events e ON o.person_id = e.person_id "
            "WHERE e.event_id = ? AND o.day = ? AND o.hour = ? AND o.status = 'planned' AND o.event_id != e.event_id",
            event_id, day, hour,
        )  # fmt: skip
        if taken:
            raise ServiceError("SLOT_TAKEN", f"event {taken[0]['event_id']} is then")
        self.write("UPDATE events SET day = ?, hour = ? WHERE event_id = ?", day, hour, event_id)
        return {"event_id": event_id, "day": day, "hour": hour}

    def cancel_event(self, event_id: str) -> dict[str, Any]:
        self._planned(event_id)
        self.write("UPDATE events SET status = 'cancelled' WHERE event_id = ?", event_id)
        return {"event_id": event_id, "status": "cancelled"}

    def _planned(self, event_id: str) -> None:
        status = self.get_event(event_id)["status"]
        if status != "planned":
            raise ServiceError(f"ALREADY_{status.upper()}", f"event {event_id} is {status}")
