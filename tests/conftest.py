"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no reason for a property to fail.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
