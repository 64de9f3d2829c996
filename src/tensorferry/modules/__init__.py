"""The nn.Module side: describing, materializing, tying and tracing models."""
