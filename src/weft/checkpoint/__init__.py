"""Read PEFT adapter folders, validate them, and pack them into images for the kernels."""

from weft.checkpoint.compose import Summand, check_sum, sum_images, summand_of
from weft.checkpoint.pack import AdapterImage, load_image, pack_image, read_adapter
from weft.checkpoint.read import AdapterFiles
from weft.checkpoint.tensors import files_of

__all__ = [
    "AdapterFiles",
    "AdapterImage",
    "Summand",
    "check_sum",
    "files_of",
    "load_image",
    "pack_image",
    "read_adapter",
    "sum_images",
    "summand_of",
]
