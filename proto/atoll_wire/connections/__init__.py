"""gRPC connections to one address: calls and their errors, pools, and the transfer of frames over several connections.

Start with `link`, which defines the connections to one core or front. `frame_transfer` uploads and downloads frames.

May import: codec, messages, outer_pb2, process, security.
"""
