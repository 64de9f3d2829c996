"""The decoders of GGUF's block types compiled by numba, a family in each file. Importing them needs numba.

Each kernel takes blocks, uint8 (n, bytes), and an array (n, elements) of float32, or of uint16 for the bits of
bfloat16, and fills it: the same numbers as the torch decoders give, rounded once.
"""
