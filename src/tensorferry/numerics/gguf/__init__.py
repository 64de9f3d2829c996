"""Decoders of the block types of GGUF, a family in each file. What decides where they are used is not here."""
