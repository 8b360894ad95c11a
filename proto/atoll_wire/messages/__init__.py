"""gRPC messages that hold frames, read and written without copies, and large messages cut into parts.

May import: codec, outer_pb2, outer_pb2_grpc.
"""
