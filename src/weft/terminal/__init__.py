"""Parts that commands share: flags, how commands end, facts about the machine, a child server."""
