"""The dashboard: a web page that shows a run, and the page's JSON API. The dashboard calls the core as an operator."""

import atoll_wire as atoll_wire  # must come before any import of grpc: see `atoll_wire.forking`
