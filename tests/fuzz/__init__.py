"""Invalid bytes for all code that decodes data from a network."""
