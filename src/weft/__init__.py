"""Weft serves many LoRA adapters from one copy of a base model."""
