"""Read PEFT adapter folders, validate them, and pack them into images for the kernels."""
