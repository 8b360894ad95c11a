"""Is the model as good? Real text, a real model, the real syncer, merge, codec and layout, in virtual time.

May import: nothing.
"""
