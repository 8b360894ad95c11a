"""The reference learner: a small language model on bytes, trained with the same three lines as anybody's."""
