"""The commands `weft bench ...` and `weft tune`."""
