"""Everything that decodes bytes from a network, fed with what nobody should send."""
