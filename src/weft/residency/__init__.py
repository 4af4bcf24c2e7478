"""Where each adapter is, in which tier, and moving it: pure policy and the transfers."""
