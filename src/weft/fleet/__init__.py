"""Clients of an engine in a thread or a process, and the supervisor that starts it again."""
