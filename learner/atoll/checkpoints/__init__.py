"""A learner's checkpoints: its parameters, its optimizers' state, and state that the user registers.

`learner_checkpoints` decides when to save and what to restore. `learner_state` collects and applies the state of the
model and the optimizers. `optimizer_names` identifies parameters by name. `staging` copies the state. `nested_state`
splits nested states. `storage` writes and reads tensors with torch.distributed.checkpoint. `directory` names and checks
folders, and `directory_lock` lets only one learner at a time use them. `settings` checks the Learner's arguments.

May import: dtensors, errors, model, ranks, stats.
"""
