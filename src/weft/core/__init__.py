"""Records, ids, configuration, the error tree and protocols. Standard library only."""
