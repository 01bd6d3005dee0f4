"""column_generation."""
