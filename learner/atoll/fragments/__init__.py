"""The state of each fragment at a learner: coded values, adoption, and the exchange between its two threads.

May import: nothing.
"""
