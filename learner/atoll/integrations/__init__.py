"""Learners inside the loops of Hugging Face's Trainer, Lightning, and Hugging Face's Accelerate.

`transformers`, `lightning` and `accelerate` each need the library of this name. `loop_session` starts and closes the
learner. `batch_tokens` counts tokens, `run_schedule` sets learning rates by the run's tokens, and `trainer_units` is a
dataset of leased units.

May import: data, errors, learner.
"""
