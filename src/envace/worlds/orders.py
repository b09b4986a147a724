"""A shop's orders."""

from __future__ import annotations

from typing import Any

from envace.worlds.base import ServiceError, World, choice, text, tool


class Orders(World):
    name = "orders"
    schema = """
    CREATE TABLE customers (customer_id TEXT PRIMARY KEY, name TEXT);
    CREATE TABLE orders (order_id TEXT PRIMARY KEY, customer_id TEXT, item TEXT, status TEXT, note TEXT);
    """
    tools = (
        tool("find_customer", "Finds a customer by first name.", ("customer_id",), name=text("First name.")),
        tool("list_orders", "Lists a customer's orders.", ("customer_id", "orders"), customer_id=text("Customer id.")),
        tool("get_order", "Shows one order.", ("order_id", "status"), order_id=text("Order id.")),
        tool(
            "cancel_order",
            "Cancels an order that has not been shipped.",
            ("order_id", "status"),
            order_id=text("Order id."),
            reason=choice("Why.", "damaged", "late", "unwanted"),
        ),
        tool(
            "ship_order",
            "Ships a pending order.",
            ("order_id", "status"),
            order_id=text("Order id."),
            speed=choice("How fast.", "normal", "express"),
        ),
    )

    def find_customer(self, name: str) -> dict[str, Any]:
        return self.one("customer", "SELECT name, customer_id FROM customers WHERE name = ?", name)

    def list_orders(self, customer_id: str) -> dict[str, Any]:
        self.one("customer", "SELECT 1 FROM customers WHERE customer_id = ?", customer_id)
        rows = self.all("SELECT item, order_id FROM orders WHERE customer_id = ? ORDER BY order_id", customer_id)
        return {"customer_id": customer_id, "orders": rows}

    def get_order(self, order_id: str) -> dict[str, Any]:
        return self.one("order", "SELECT order_id, item, status FROM orders WHERE order_id = ?", order_id)

    def cancel_order(self, order_id: str, reason: str) -> dict[str, Any]:
        return self._change(order_id, "cancelled", reason)

    def ship_order(self, order_id: str, speed: str) -> dict[str, Any]:
        return self._change(order_id, "shipped", speed)

    def _change(self, order_id: str, status: str, note: str) -> dict[str, Any]:
        order = self.get_order(order_id)
        if order["status"] != "pending":
            raise ServiceError(f"ALREADY_{order['status'].upper()}", f"order {order_id} is {order['status']}")
        self.write("UPDATE orders SET status = ?, note = ? WHERE order_id = ?", status, note, order_id)
        return {"order_id": order_id, "status": status}
