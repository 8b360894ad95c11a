"""The dashboard: a web page that shows a run, and its JSON API. It calls the core as an operator."""

import atoll_wire as atoll_wire  # must come before any import of grpc: see `atoll_wire.forking`
