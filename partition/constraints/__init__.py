"""constraints."""
