"""A bank's accounts."""

from __future__ import annotations

from typing import Any

from envace.worlds.base import ServiceError, World, text, tool, whole


class Bank(World):
    name = "bank"
    schema = """
    CREATE TABLE holders (holder_id TEXT PRIMARY KEY, name TEXT);
    CREATE TABLE accounts (account_id TEXT PRIMARY KEY, holder_id TEXT, kind TEXT, balance INTEGER, status TEXT);
    """
    tools = (
        tool("find_holder", "Finds an account holder by first name.", ("holder_id",), name=text("First name.")),
        tool("list_accounts", "Lists a holder's accounts.", ("holder_id", "accounts"), holder_id=text("Holder id.")),
        tool("get_account", "Shows one account.", ("account_id", "balance", "status"), account_id=text("Account id.")),
        tool(
            "deposit",
            "Pays money into an open account.",
            ("account_id", "deposited"),
            account_id=text("Account id."),
            amount=whole("Whole euros.", 1, 99),
        ),
        tool(
            "transfer",
            "Moves money between two open accounts.",
            ("from_account", "to_account", "amount"),
            from_account=text("Account that pays."),
            to_account=text("Account that receives."),
            amount=whole("Whole euros.", 1, 99),
        ),
        tool("freeze_account", "Freezes an open account.", ("account_id", "status"), account_id=text("Account id.")),
    )

    def find_holder(self, name: str) -> dict[str, Any]:
        return self.one("holder", "SELECT name, holder_id FROM holders WHERE name = ?", name)

    def list_accounts(self, holder_id: str) -> dict[str, Any]:
        self.one("holder", "SELECT 1 FROM holders WHERE holder_id = ?", holder_id)
        rows = self.all("SELECT kind, account_id FROM accounts WHERE holder_id = ? ORDER BY account_id", holder_id)
        return {"holder_id": holder_id, "accounts": rows}

    def get_account(self, account_id: str) -> dict[str, Any]:
        return self.one(
            "account", "SELECT account_id, kind, balance, status FROM accounts WHERE account_id = ?", account_id
        )

    def deposit(self, account_id: str, amount: int) -> dict[str, Any]:
        self._open(account_id)
        self.write("UPDATE accounts SET balance = balance + ? WHERE account_id = ?", amount, account_id)
        return {"account_id": account_id, "deposited": amount}

    def transfer(self, from_account: str, to_account: str, amount: int) -> dict[str, Any]:
        payer = self._open(from_account)
        self._open(to_account)
        if payer["balance"] < amount:
            raise ServiceError("INSUFFICIENT_FUNDS", f"account {from_account} holds {payer['balance']}")
        self.write("UPDATE accounts SET balance = balance - ? WHERE account_id = ?", amount, from_account)
        self.write("UPDATE accounts SET balance = balance + ? WHERE account_id = ?", amount, to_account)
        return {"from_account": from_account, "to_account": to_account, "amount": amount}

    def freeze_account(self, account_id: str) -> dict[str, Any]:
        self._open(account_id)
        self.write("UPDATE accounts SET status = 'frozen' WHERE account_id = ?", account_id)
        return {"account_id": account_id, "status": "frozen"}

    def _open(self, account_id: str) -> dict[str, Any]:
        account = self.get_account(account_id)
        if account["status"] != "open":
            raise ServiceError("ACCOUNT_FROZEN", f"account {account_id} is frozen")
        return account
