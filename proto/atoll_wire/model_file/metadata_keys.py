"""Keys in the metadata of an export. The file of the initial parameters has those that list tensors."""

RUN, GENERATION = "atoll.run", "atoll.generation"
VERSIONS = "atoll.versions"  # of each fragment, separated by commas

# Each value is a JSON list of names.
LISTED = "atoll.initial"  # unshared tensors
BUFFERS = "atoll.buffers"
FROZEN = "atoll.frozen"  # frozen parameters that the file lacks
