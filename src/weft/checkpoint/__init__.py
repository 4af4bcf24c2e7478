"""Read PEFT adapter folders, validate them, and pack them into images for the kernels."""

from weft.checkpoint.pack import AdapterImage, load_image, pack_image

__all__ = ["AdapterImage", "load_image", "pack_image"]
