"""One page that shows a run as it goes, and the JSON API behind it; it asks a core as an operator does."""

import atoll_wire as atoll_wire  # before anything imports grpc: see its `forking`
