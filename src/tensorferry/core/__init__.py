"""The pure heart: values and decisions. Standard library only; no torch, no I/O, no logging."""
