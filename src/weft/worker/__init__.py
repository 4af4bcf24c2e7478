"""Runs steps on one device."""
