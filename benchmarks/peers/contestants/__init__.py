"""The contestants, one file for each library; `CONTESTANTS` are the ways in which it is used."""
