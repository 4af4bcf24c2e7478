"""Calls of tools: a reader for each syntax, and the forms that make models write them."""
