"""What learners, fronts and cores share: messages, layout, codec, connections, certificates, parts of a process."""

from atoll_wire import forking as forking  # must come before any import of grpc
