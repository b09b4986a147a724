"""Responders: who answers a tool call."""
