"""Loads the weights of language models: planned first, strict, with bounded memory."""
