"""The contract between learners, fronts and cores: messages, layout of parameters, codec."""
