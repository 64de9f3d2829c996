"""The Model Loader face: loaders with the three stages engines expect."""
