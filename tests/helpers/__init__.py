"""What several tests build their checkpoints and models with."""
