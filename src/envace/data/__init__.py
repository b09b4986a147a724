"""Tasks on disk."""
