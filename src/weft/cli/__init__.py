"""The commands: where everything is put together."""
