"""gRPC connections to one address: calls and their errors, pools, and the transfer of frames over several connections.

Start with `link`: the connections of a learner or a front to a core. `frame_transfer` uploads and downloads.

May import: codec, messages, outer_pb2, process, security.
"""
