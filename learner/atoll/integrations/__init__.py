"""Learners inside the loops of Hugging Face's Trainer, Lightning, and Hugging Face's Accelerate.

`transformers`, `lightning` and `accelerate` each need the library of this name. `loop_session` starts and closes the
learner. `batch_tokens` counts tokens, and `run_schedule` sets learning rates by the run's tokens.

May import: errors, learner.
"""
