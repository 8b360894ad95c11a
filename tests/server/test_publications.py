"""Published updates: the cache stays within its limits, and only slow links get compressed payloads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from atoll_server.merging.merge import Update
from atoll_server.settings import Limits
from atoll_server.shard.publications import Publication, UpdateCache
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.layout.frame_spans import Codec, Compression
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan

from tests.bare_shard import Rows, bare_shard

LAYOUT = plan((TensorSpec("w", (8192,), "float32", MergeKind.AVERAGE),), 1)


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


def update() -> Update:
    values = np.random.default_rng(1).standard_normal(8192).astype(np.float32)
    contents = [frame_codec.quantise_frame(values[span.place], span, Codec.INT4) for span in LAYOUT.fragments[0].frames]
    return Update(1, tuple(map(frame_codec.store, contents)), 7)


def test_compressing_changes_neither_contents_nor_receipts():
    fast = replace(Publication.of(update(), compressed=False), receipts=(pb.Receipt(seq=3),))
    slow = fast.compress()
    assert slow == replace(Publication.of(update(), compressed=True), receipts=fast.receipts)
    assert slow.size_bytes < 0.85 * fast.size_bytes
    assert not fast.compressed
    assert slow.compressed


def test_another_form_of_an_update_replaces_it_only_while_it_is_cached():
    cache, fast = UpdateCache(1 << 20, 4), Publication.of(update(), compressed=False)
    cache.replace(0, fast)
    assert cache.get(0, 1) is None
    cache.add(0, fast)
    cache.replace(0, fast.compress())
    assert cache.size_bytes == fast.compress().size_bytes


@pytest.mark.parametrize("compression", Compression)
def test_the_first_fetch_over_a_slow_link_has_an_update_compressed_once(tmp_path: Path, monkeypatch, compression):
    async def found() -> tuple[bool, list[bool], int]:
        shard = bare_shard(tmp_path, LAYOUT, Limits(), Rows(), [], compression=compression)
        fragment, times = shard.fragments[0], list[Publication]()
        shard.cache.add(0, Publication.of(update(), compressed=False))
        compress = Publication.compress
        monkeypatch.setattr(Publication, "compress", lambda self: times.append(self) or compress(self))
        first = await shard.publication(fragment, 1, fast=True)
        slow = await asyncio.gather(*(shard.publication(fragment, 1, fast=False) for _ in range(3)))
        assert await shard.publication(fragment, 2, fast=True) is None
        return first.compressed, [each.compressed for each in slow], len(times)

    wanted = {
        Compression.AUTO: (False, [True] * 3, 1), Compression.ALWAYS: (True, [True] * 3, 1),
        Compression.NEVER: (False, [False] * 3, 0),
    }  # fmt: skip
    assert asyncio.run(found()) == wanted[compression]


@pytest.mark.parametrize(
    ("fetches", "compressed"), [((), True), ((True, True), False), ((False,), True), ((True, False), True)]
)
def test_an_update_is_compressed_at_its_merge_unless_only_fast_links_fetched_the_one_before(
    tmp_path: Path, fetches, compressed
):
    async def found() -> bool:
        shard = bare_shard(tmp_path, LAYOUT, Limits(), Rows(), [])
        fragment = shard.fragments[0]
        shard.cache.add(0, replace(Publication.of(update(), compressed=False), version=0))
        for fast in fetches:
            await shard.publication(fragment, 0, fast=fast)
        return shard.compresses(fragment)

    assert asyncio.run(found()) is compressed
