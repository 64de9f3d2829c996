"""The decoders of GGUF's block types for GPUs, in Triton, a family in each file. Importing them needs triton.

Each function says what one element is: `b` points to the first byte of its block, `i` is its place there, and `table`
points to the table that `filling.TABLES` names for the type, if any. Called with tensors of them it gives float32, the
numbers that the torch decoders give; what the bytes mean is said beside those. `filling` puts them where they belong.
"""
