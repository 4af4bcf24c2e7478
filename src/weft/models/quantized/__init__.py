"""Quantized checkpoints, read as the values that they stand for.

`stated` checks what config.json says of the quantization, without torch. `reading` joins the
tensors of a file: what belongs to one matrix is read as that matrix's dense tensor would be, so
that nothing behind it knows of the format. A method is a row in each of both, and one file.
"""
