"""Forms that outputs must have, and their compilation."""
