"""The documents for people: their fences run, their commands and options exist, and their words are those of the code."""
