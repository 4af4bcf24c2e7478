"""The command line: where the parts of a server are put together."""
