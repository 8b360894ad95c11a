"""The dashboard: a page that shows a run, and the JSON API behind it. It calls a core as an operator does."""

import atoll_wire as atoll_wire  # before anything imports grpc: see its `forking`
