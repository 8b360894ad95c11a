"""gRPC messages with frames, read and written without copies, and large messages that are cut into parts.

May import: codec, outer_pb2, outer_pb2_grpc.
"""
