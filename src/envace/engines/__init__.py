"""Engines sample from a policy and update its weights."""
