"""gRPC messages with frames, read and written without copies, and large messages that are cut into pieces.

May import: codec, outer_pb2, outer_pb2_grpc.
"""
