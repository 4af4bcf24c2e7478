"""What all commands have in common: flags, how they end, and what they say of the machine."""
