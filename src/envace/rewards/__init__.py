"""Rewards: what an episode is worth. They see tasks, messages and calls, never an engine or a token."""
