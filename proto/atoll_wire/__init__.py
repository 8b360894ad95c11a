"""The contract between learners, fronts and cores: messages, layout of parameters, codec."""

from atoll_wire import forking as forking  # before anything imports grpc
