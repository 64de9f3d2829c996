"""Moving bytes as a plan says."""
