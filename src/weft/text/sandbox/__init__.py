"""TextProcess processes for texts that nobody trusts: they can be killed, and have limits."""
