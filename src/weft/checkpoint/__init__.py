"""Read PEFT adapter folders, validate them, and pack them into images for the kernels."""

from weft.checkpoint.pack import AdapterImage, load_image, pack_image
from weft.checkpoint.read import AdapterFiles
from weft.checkpoint.tensors import files_of

__all__ = ["AdapterFiles", "AdapterImage", "files_of", "load_image", "pack_image"]
