"""Loaders that leave the reading of safetensors files to another library: one file for each, imported when asked for.

What is read, where it goes and whether it is complete, the plan says, as ever.
"""
