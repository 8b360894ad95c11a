"""A user's program, whose types are checked from outside."""
