"""Tests of learner."""
