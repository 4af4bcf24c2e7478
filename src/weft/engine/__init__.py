"""The engine: what runs in each step, the arrays of a step, the device, and clients of it all."""
