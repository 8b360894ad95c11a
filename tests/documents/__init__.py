"""The documents for people: fences run, commands and options exist, and quoted messages are those of the code."""
