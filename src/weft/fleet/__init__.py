"""Clients of an engine in this thread or a process, and the supervisor that starts it again."""
