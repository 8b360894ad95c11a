"""Callbacks and helpers for trainers: Hugging Face's Trainer and Accelerate, and Lightning.

`transformers`, `lightning` and `accelerate` each need the library of this name. `loop_session` is the learner inside a
trainer's loop. `batch_tokens` counts tokens, and `run_schedule` sets learning rates by the run's tokens.

May import: errors, learner.
"""
