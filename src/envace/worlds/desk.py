"""A support desk's tickets."""

from __future__ import annotations

from typing import Any

from envace.worlds.base import ServiceError, World, choice, text, tool


class Desk(World):
    name = "desk"
    schema = """
    CREATE TABLE users (user_id TEXT PRIMARY KEY, name TEXT);
    CREATE TABLE tickets (ticket_id TEXT PRIMARY KEY, user_id TEXT, topic TEXT, status TEXT, team TEXT, priority TEXT);
    """
    tools = (
        tool("find_user", "Finds a user by first name.", ("user_id",), name=text("First name.")),
        tool("list_tickets", "Lists a user's tickets.", ("user_id", "tickets"), user_id=text("User id.")),
        tool("get_ticket", "Shows one ticket.", ("ticket_id", "status", "team"), ticket_id=text("Ticket id.")),
        tool(
            "assign_ticket",
            "Gives an open ticket to a team.",
            ("ticket_id", "team"),
            ticket_id=text("Ticket id."),
            team=choice("Team.", "network", "billing", "hardware"),
        ),
        tool(
            "set_priority",
            "Sets an open ticket's priority.",
            ("ticket_id", "priority"),
            ticket_id=text("Ticket id."),
            priority=choice("Priority.", "low", "high", "urgent"),
        ),
        tool("close_ticket", "Closes an open ticket.", ("ticket_id", "status"), ticket_id=text("Ticket id.")),
    )

    def find_user(self, name: str) -> dict[str, Any]:
        return self.one("user", "SELECT name, user_id FROM users WHERE name = ?", name)

    def list_tickets(self, user_id: str) -> dict[str, Any]:
        self.one("user", "SELECT 1 FROM users WHERE user_id = ?", user_id)
        rows = self.all("SELECT topic, ticket_id FROM tickets WHERE user_id = ? ORDER BY ticket_id", user_id)
        return {"user_id": user_id, "tickets": rows}

    def get_ticket(self, ticket_id: str) -> dict[str, Any]:
        return self.one("ticket", "SELECT ticket_id, topic, status, team FROM tickets WHERE ticket_id = ?", ticket_id)

    def assign_ticket(self, ticket_id: str, team: str) -> dict[str, Any]:
        self._open(ticket_id)
        self.write("UPDATE tickets SET team = ? WHERE ticket_id = ?", team, ticket_id)
        return {"ticket_id": ticket_id, "team": team}

    def set_priority(self, ticket_id: str, priority: str) -> dict[str, Any]:
        self._open(ticket_id)
        self.write("UPDATE tickets SET priority = ? WHERE ticket_id = ?", priority, ticket_id)
        return {"ticket_id": ticket_id, "priority": priority}

    def close_ticket(self, ticket_id: str) -> dict[str, Any]:
        self._open(ticket_id)
        self.write("UPDATE tickets SET status = 'closed' WHERE ticket_id = ?", ticket_id)
        return {"ticket_id": ticket_id, "status": "closed"}

    def _open(self, ticket_id: str) -> None:
        if self.get_ticket(ticket_id)["status"] != "open":
            raise ServiceError("ALREADY_CLOSED", f"ticket {ticket_id} is closed")
