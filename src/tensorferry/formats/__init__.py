"""What bytes mean: headers in, a catalogue out."""
