"""Measures how the cost of outer syncs grows: with parameters, learners, fragments, fronts and shards.

`__main__` measures the curves. `crowd` runs many synthetic learners in one process. `storm` measures many learners that
join at the same time. `point` is one result, and `plots` draws the curves.

May import: conditions, data_plane, shards.
"""
