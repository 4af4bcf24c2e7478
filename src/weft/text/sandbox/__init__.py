"""Worker processes for texts that nobody trusts: they have limits, and can be killed."""
