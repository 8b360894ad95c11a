"""The cache of updates stays within its limits."""

from __future__ import annotations

from atoll_server.shard.publications import Publication, UpdateCache


def test_the_cache_keeps_the_newest_updates_within_its_limits():
    cache = UpdateCache(limit_bytes=100, limit_versions=3)
    for version in range(1, 6):
        cache.add(0, Publication(version, (), (10,), 0))
    assert [version for version in range(1, 6) if cache.get(0, version)] == [3, 4, 5]
    for version in range(1, 20):
        cache.add(1, Publication(version, (), (40,), 0))
    assert cache.size_bytes <= 100
    assert cache.get(1, 19) is not None
    assert cache.get(0, 5) is None
