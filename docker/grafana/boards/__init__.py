"""What each dashboard shows; `parts` has what they are made of."""
