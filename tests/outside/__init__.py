"""A program of a user, whose types are checked from outside."""
