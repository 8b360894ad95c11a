"""The user's model: its parameters, access to their values, and its optimizers.

`parameters` lists the trainable tensors, and `parameter_views` views them by fragment. `samples` reads a few values.
`first_file` and `tensor_stream` write initial parameters. `optimizer_copies` and `optimizer_hooks` handle optimizers.

May import: device, dtensors, errors, fragments, ranks.
"""
