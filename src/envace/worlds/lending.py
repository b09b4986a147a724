"""A library's loans."""

from __future__ import annotations

from typing import Any

from envace.worlds.base import ServiceError, World, choice, text, tool, whole


class Library(World):
    name = "library"
    schema = """
    CREATE TABLE members (member_id TEXT PRIMARY KEY, name TEXT);
    CREATE TABLE loans (loan_id TEXT PRIMARY KEY, member_id TEXT, title TEXT, status TEXT, weeks INTEGER, condition TEXT);
    """
    tools = (
        tool("find_member", "Finds a member by first name.", ("member_id",), name=text("First name.")),
        tool("list_loans", "Lists a member's loans.", ("member_id", "loans"), member_id=text("Member id.")),
        tool("get_loan", "Shows one loan.", ("loan_id", "status"), loan_id=text("Loan id.")),
        tool(
            "renew_loan",
            "Renews a loan that is not overdue.",
            ("loan_id", "weeks"),
            loan_id=text("Loan id."),
            weeks=whole("Weeks.", 1, 9),
        ),
        tool(
            "return_book",
            "Takes a borrowed book back.",
            ("loan_id", "status"),
            loan_id=text("Loan id."),
            condition=choice("The book's condition.", "good", "worn"),
        ),
    )

    def find_member(self, name: str) -> dict[str, Any]:
        return self.one("member", "SELECT name, member_id FROM members WHERE name = ?", name)

    def list_loans(self, member_id: str) -> dict[str, Any]:
        self.one("member", "SELECT 1 FROM members WHERE member_id = ?", member_id)
        rows = self.all("SELECT title, loan_id FROM loans WHERE member_id = ? ORDER BY loan_id", member_id)
        return {"member_id": member_id, "loans": rows}

    def get_loan(self, loan_id: str) -> dict[str, Any]:
        return self.one("loan", "SELECT loan_id, title, status FROM loans WHERE loan_id = ?", loan_id)

    def renew_loan(self, loan_id: str, weeks: int) -> dict[str, Any]:
        status = self.get_loan(loan_id)["status"]
        if status != "borrowed":
            raise ServiceError(f"LOAN_{status.upper()}", f"loan {loan_id} is {status}")
        self.write("UPDATE loans SET weeks = ? WHERE loan_id = ?", weeks, loan_id)
        return {"loan_id": loan_id, "weeks": weeks}

    def return_book(self, loan_id: str, condition: str) -> dict[str, Any]:
        if self.get_loan(loan_id)["status"] == "returned":
            raise ServiceError("LOAN_RETURNED", f"loan {loan_id} is returned")
        self.write("UPDATE loans SET status = 'returned', condition = ? WHERE loan_id = ?", condition, loan_id)
        return {"loan_id": loan_id, "status": "returned"}
