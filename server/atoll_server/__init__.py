"""The core and the front: the outer optimizer, rounds, the ledger, and the gRPC services.

This package imports neither torch nor the learner.
"""

import atoll_wire as atoll_wire  # must come before any import of grpc (see `atoll_wire.forking`)
