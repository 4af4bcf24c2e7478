"""Quantized checkpoints, read as the values that they stand for.

`stated` checks, without torch, what config.json says about the quantization. `reading` joins the
tensors of each matrix into one that is read like a dense tensor, so that other code need not know
the format. A method is a row in each of these two, and a file.
"""
