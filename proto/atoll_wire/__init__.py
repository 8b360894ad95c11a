"""The contract between learners, fronts and cores: messages, the layout of parameters, and the codec."""

from atoll_wire import forking as forking  # must come before any import of grpc
