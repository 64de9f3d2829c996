"""How fast loaders of weights are beside each other and beside what the machine can do; see README.md here."""
