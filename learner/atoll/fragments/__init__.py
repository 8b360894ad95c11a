"""The state of each fragment at a learner: coded values, adoption, and the exchange between the learner's threads.

May import: nothing.
"""
