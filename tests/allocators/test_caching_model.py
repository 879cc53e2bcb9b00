"""The caching allocator against a second model, written apart from it and as naively as possible.

The model keeps one flat list of pieces and looks through all of it for everything; it shares no code with the
allocator and has a first-fit driver of its own. After every operation the address, the reserved, allocated and
requested bytes, the number of segments and all pieces must agree, and at the end of short stretches all 123
statistics. Bugs planted into the allocator must be found by the same comparison.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import hbmtwin.allocators.caching.policy as subject
from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.caching.blocks import ALLOCATED, FREE, Block, BlockPool, FreeBlocks
from hbmtwin.allocators.caching.release import release_blocks
from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.records import Tag

MIB = 1 << 20
FIRST = 2 * MIB
ENDLESS = 1 << 64


@dataclass
class Piece:
    at: int
    size: int
    segment: int
    large: bool
    stream: int
    asked: int | None = None


@dataclass
class Naive:
    capacity: int
    pad: int
    cap: int = ENDLESS
    split_limit: int = ENDLESS
    tolerance: int = 20 * MIB
    large_segment: int = 20 * MIB
    division: int = 0
    pieces: list[Piece] = field(default_factory=list)
    segments: dict[int, tuple[int, bool]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    others: int = 0

    def need(self, asked: int) -> int:
        n = asked + self.pad
        if self.division and n > 512 * self.division:
            low = 1
            while low * 2 <= n:
                low *= 2
            step = low // self.division
            return n if n == low else (n + step - 1) // step * step
        return max(512, (n + 511) // 512 * 512)

    def segment_size(self, need: int) -> int:
        if need <= MIB:
            return 2 * MIB
        return self.large_segment if need < 10 * MIB else (need + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)

    def malloc(self, asked: int, stream: int) -> Piece | None:
        need = self.need(asked)
        large = need > MIB
        fitting = [p for p in self.free_pieces(large, stream) if p.size >= need]
        found = min(fitting, key=lambda p: (p.size, p.at), default=None)
        if found is not None and found.size >= self.split_limit:
            fits = need >= self.split_limit and found.size < need + self.tolerance
            found = found if fits else None
        if found is None:
            found = self.from_driver(need, large, stream)
        if found is None:
            self.bump("num_ooms")
            return None
        left = found.size - need
        if (left > MIB and need < self.split_limit) if large else left >= 512:
            self.pieces.append(Piece(found.at + need, left, found.segment, large, stream))
            found.size = need
        found.asked = asked
        return found

    def free_pieces(self, large: bool, stream: int) -> list[Piece]:
        return [p for p in self.pieces if p.asked is None and p.large == large and p.stream == stream]

    def from_driver(self, need: int, large: bool, stream: int) -> Piece | None:
        size = self.segment_size(need)
        if (new := self.segment(size, large, stream)) is not None:
            return new
        dropped = self.split_limit < ENDLESS and self.drop_oversize(max(need, self.split_limit), large, stream)
        if dropped and (new := self.segment(size, large, stream)) is not None:
            return new
        self.empty_cache()
        self.bump("num_alloc_retries")
        return self.segment(size, large, stream)

    def segment(self, size: int, large: bool, stream: int) -> Piece | None:
        held = sum(n for n, _ in self.segments.values())
        if held + size > self.cap or held + size + self.others > self.capacity:
            return None
        at = FIRST
        for start in sorted(self.segments):
            if start - at >= size:
                break
            at = start + self.segments[start][0]
        self.segments[at] = (size, large)
        self.bump("num_device_alloc")
        self.change("segment", large, 1)
        self.change("reserved_bytes", large, size)
        if size >= self.split_limit:
            self.change("oversize_segments", None, 1)
        piece = Piece(at, size, at, large, stream)
        self.pieces.append(piece)
        return piece

    def drop_segment(self, piece: Piece) -> None:
        self.pieces.remove(piece)
        del self.segments[piece.at]
        self.bump("num_device_free")
        self.change("segment", piece.large, -1)
        self.change("reserved_bytes", piece.large, -piece.size)
        if piece.size >= self.split_limit:
            self.change("oversize_segments", None, -1)

    def whole(self, piece: Piece) -> bool:
        return piece.asked is None and self.segments[piece.segment][0] == piece.size

    def drop_oversize(self, wanted: int, large: bool, stream: int) -> bool:
        free = self.free_pieces(large, stream)
        free.sort(key=lambda p: (p.size, p.at))
        enough = [p for p in free if p.size >= wanted]
        if enough:
            self.drop_segment(enough[0])
            return True
        gone = 0
        for piece in reversed(free):
            if gone < wanted and piece.size >= self.split_limit:
                self.drop_segment(piece)
                gone += piece.size
        return gone >= wanted

    def empty_cache(self) -> None:
        self.bump("num_sync_all_streams")
        for piece in [p for p in self.pieces if self.whole(p)]:
            self.drop_segment(piece)

    def free(self, piece: Piece) -> None:
        piece.asked = None
        for other in [p for p in self.pieces if p.segment == piece.segment and p.asked is None and p is not piece]:
            if other.at + other.size == piece.at or piece.at + piece.size == other.at:
                self.pieces.remove(other)
                piece.at = min(piece.at, other.at)
                piece.size += other.size

    # Statistics: segments change where it happens, everything else is recounted after each operation.

    def bump(self, key: str) -> None:
        self.stats[key] = self.stats.get(key, 0) + 1

    def change(self, family: str, large: bool | None, by: int) -> None:
        pools = [""] if large is None else [".all", ".large_pool" if large else ".small_pool"]
        for pool in pools:
            key = family + pool
            now = self.stats.get(f"{key}.current", 0) + by
            self.stats[f"{key}.current"] = now
            self.stats[f"{key}.peak"] = max(now, self.stats.get(f"{key}.peak", 0))
            side = "allocated" if by > 0 else "freed"
            self.stats[f"{key}.{side}"] = self.stats.get(f"{key}.{side}", 0) + abs(by)

    def recount(self) -> None:
        now: dict[tuple[str, bool | None], int] = {}
        for large in (False, True):
            live = [p for p in self.pieces if p.large == large and p.asked is not None]
            split = [p for p in self.pieces if p.large == large and p.asked is None and not self.whole(p)]
            now["allocation", large] = now["active", large] = len(live)
            now["allocated_bytes", large] = now["active_bytes", large] = sum(p.size for p in live)
            now["requested_bytes", large] = sum(p.asked or 0 for p in live)
            now["inactive_split", large] = len(split)
            now["inactive_split_bytes", large] = sum(p.size for p in split)
        now["oversize_allocations", None] = sum(p.size >= self.split_limit for p in self.pieces if p.asked is not None)
        for (family, large), value in now.items():
            pool = "" if large is None else ".large_pool" if large else ".small_pool"
            by = value - self.stats.get(f"{family}{pool}.current", 0)
            if by:
                self.change(family, large, by)


SIZES = [512, MIB, 2 * MIB, 3 * MIB, 10 * MIB, 11 * MIB, 12 * MIB, 20 * MIB, 24 * MIB, 40 * MIB]


def draw_size(chance: random.Random) -> int:
    """Mostly log-uniform, often at a threshold or a few bytes beside it."""
    if chance.random() < 0.35:
        return max(1, chance.choice(SIZES) + chance.choice([-1024, -512, -33, -32, -31, -1, 0, 1, 512]))
    return int(2 ** chance.uniform(4, 25.3))


def compare(allocator: CachingAllocator, driver: HbmDriver, naive: Naive, operations: int, seed: int) -> int:
    """Drive both with the same operations; return how many failed for lack of memory."""
    chance = random.Random(seed)
    live: list[tuple[int, Piece]] = []
    failures = 0
    streams = chance.choice([1, 1, 3])
    for i in range(operations):
        kind = chance.random()
        if kind < 0.004:
            allocator.empty_cache()
            naive.empty_cache()
        elif kind < 0.008:
            naive.others = chance.choice([0, 0, 30 * MIB, 60 * MIB])
            driver.set_tenants(naive.others)
        elif kind < 0.53 or not live:
            size, stream = draw_size(chance), chance.randrange(streams)
            piece = naive.malloc(size, stream)
            failure = None
            try:
                handle = allocator.malloc(size, stream=stream, tag=Tag.KV)
            except OutOfMemory as raised:
                failure = raised
            if failure is not None:
                assert piece is None, f"operation {i}: {size} bytes fit"
                failures += 1
                barred = failure.facts.largest_free_bytes >= failure.facts.need_bytes
                assert barred == (failure.facts.rule in ("segment_size", "stream", "pool"))
                cause = classify(failure.facts)
                assert barred == (cause is Cause.ALLOCATOR_RULE) or cause is Cause.NEVER_FITS
                for _ in range(len(live) // 8):
                    handle, piece = live.pop(chance.randrange(len(live)))
                    allocator.free(handle)
                    naive.free(piece)
                    naive.recount()
            else:
                assert piece is not None, f"operation {i}: {size} bytes do not fit"
                assert allocator.address(handle) == piece.at, f"operation {i}"
                live.append((handle, piece))
        else:
            handle, piece = live.pop(chance.randrange(len(live)))
            allocator.free(handle)
            naive.free(piece)
        naive.recount()
        usage = allocator.usage()
        asked = [p.asked for p in naive.pieces if p.asked is not None]
        assert usage.requested == sum(asked), f"operation {i}"
        assert usage.allocated == sum(p.size for p in naive.pieces if p.asked is not None), f"operation {i}"
        assert usage.reserved == sum(n for n, _ in naive.segments.values()), f"operation {i}"
        assert usage.largest_free == max((p.size for p in naive.pieces if p.asked is None), default=0), f"operation {i}"
        if i % 5 == 0:
            agree(allocator, naive)
    agree(allocator, naive)
    return failures


def agree(allocator: CachingAllocator, naive: Naive) -> None:
    """Every statistic and every block."""
    stats = allocator.stats()
    del stats["max_split_size"]
    assert {key: value for key, value in stats.items() if value} == {k: v for k, v in naive.stats.items() if v}
    blocks = [
        (s.address, s.pool == "large", s.stream, b.address, b.size, b.requested if b.state != "inactive" else None)
        for s in allocator.walk()
        for b in s.blocks
    ]
    pieces = sorted(naive.pieces, key=lambda p: p.at)
    assert blocks == [(p.segment, p.large, p.stream, p.at, p.size, p.asked) for p in pieces]
    allocator.check()


CASES: dict[str, tuple[int, dict[str, object], dict[str, int]]] = {
    "torch_npu": (160, {}, {"pad": 32}),
    "torch_cuda": (160, {"flavour": "torch_cuda"}, {"pad": 0}),
    "torch_npu, max_split and cap": (
        200,
        {"alloc_conf": "max_split_size_mb:24", "limit_bytes": 160 * MIB},
        {"pad": 32, "split_limit": 24 * MIB, "cap": 160 * MIB},
    ),
    "torch_cuda, max_split": (
        165,
        {"flavour": "torch_cuda", "alloc_conf": "max_split_size_mb:20"},
        {"pad": 0, "split_limit": 20 * MIB},
    ),
    "torch_cuda, large segments": (
        200,
        {
            "flavour": "torch_cuda",
            "alloc_conf": "large_segment_size_mb:33,max_split_size_mb:36,max_non_split_rounding_mb:40",
            "limit_bytes": 183 * MIB,
        },
        {"pad": 0, "split_limit": 36 * MIB, "tolerance": 40 * MIB, "large_segment": 33 * MIB, "cap": 183 * MIB},
    ),
    "torch_npu, power-of-two rounding": (
        160,
        {"alloc_conf": "roundup_power2_divisions:4"},
        {"pad": 32, "division": 4},
    ),
}


def run(name: str, operations: int, seed: int) -> int:
    capacity, settings, expected = CASES[name]
    driver = HbmDriver(capacity * MIB)
    allocator = CachingAllocator(driver, CachingConfig(**settings))
    return compare(allocator, driver, Naive(capacity * MIB, **expected), operations, seed)


def run_all(name: str) -> int:
    """10,000 operations; return how many failed for lack of memory."""
    return sum(run(name, 2000, seed) for seed in range(5))


@pytest.mark.parametrize("name", CASES)
def test_both_models_agree_on_everything(name: str) -> None:
    assert run_all(name) > 100, "the failing path was taken often"


Plant = Callable[[pytest.MonkeyPatch], None]


def plant(place: object, name: str) -> Callable[[Callable[..., object]], Plant]:
    """A plant that puts the decorated function where *name* of *place* was."""
    return lambda wrong: lambda patch: patch.setattr(place, name, wrong)


@plant(CachingAllocator, "_get_free_block")
def ties_go_to_the_highest_address(self: CachingAllocator, home: FreeBlocks, rounded: int) -> Block | None:
    fitting = [b for b in home.blocks if b.size >= rounded]
    block = max(fitting, key=lambda b: (-b.size, b.address), default=None)
    if block is not None:
        home.drop(block)
    return block


@plant(CachingAllocator, "_get_free_block")
def first_fit(self: CachingAllocator, home: FreeBlocks, rounded: int) -> Block | None:
    block = min((b for b in home.blocks if b.size >= rounded), key=lambda b: b.address, default=None)
    if block is not None:
        home.drop(block)
    return block


def no_merge_to_the_right(patch: pytest.MonkeyPatch) -> None:
    right = Segments.free_block

    def wrong(self: Segments, block: Block) -> None:
        after = block.next
        if after is not None and after.state == FREE:
            after.state = ALLOCATED
            right(self, block)
            after.state = FREE
        else:
            right(self, block)

    patch.setattr(Segments, "free_block", wrong)


def small_segments_are_kept(patch: pytest.MonkeyPatch) -> None:
    def wrong(segments: Segments, expandable: object, pool: BlockPool, **options: bool) -> None:
        if pool.kind == 1:
            release_blocks(segments, expandable, pool, **options)

    patch.setattr(subject, "release_blocks", wrong)


@plant(subject, "release_available_cached_blocks")
def the_oversize_range_is_not_released_apart(*_: object) -> bool:
    return False


@plant(CachingAllocator, "_get_free_block")
def oversize_blocks_are_cut(self: CachingAllocator, home: FreeBlocks, rounded: int) -> Block | None:
    return home.take(rounded)


def oversize_requests_take_no_larger_block(patch: pytest.MonkeyPatch) -> None:
    right = CachingConfig.read_alloc_conf

    def wrong(self: CachingConfig) -> object:
        conf = right(self)
        conf.max_non_split_rounding = 512
        return conf

    patch.setattr(CachingConfig, "read_alloc_conf", wrong)


@plant(subject, "release_available_cached_blocks")
def the_smallest_oversize_blocks_go_first(segments: Segments, home: FreeBlocks, rounded: int, limit: int) -> bool:
    wanted = max(rounded, limit)
    released = 0
    for block in [b for b in home.blocks if b.size >= limit]:
        if released < wanted:
            released += block.size
            segments.release_segment(block)
    return released >= wanted


def plant_pad(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hbmtwin.allocators.caching.releases.NPU_PAD", 0)


def plant_constant(name: str, value: int) -> Plant:
    return lambda patch: patch.setattr(subject, name, value)


@pytest.mark.parametrize(
    "plant",
    [
        plant_pad,
        plant_constant("SPLIT_REMAINDER", MIB - 512),
        plant_constant("SPLIT_REMAINDER", MIB + 512),
        plant_constant("MIN_BLOCK_SIZE", 1024),
        plant_constant("SMALL_SIZE", MIB + 512),
    ],
    ids=["pad", "split at 1 MiB", "split later", "small split at 1024", "pool boundary"],
)
def test_a_wrong_number_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_all("torch_npu")


@pytest.mark.parametrize(
    "plant", [ties_go_to_the_highest_address, first_fit, no_merge_to_the_right, small_segments_are_kept]
)
def test_a_wrong_rule_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_all("torch_npu")


@pytest.mark.parametrize(
    "plant",
    [
        the_oversize_range_is_not_released_apart,
        oversize_blocks_are_cut,
        oversize_requests_take_no_larger_block,
        the_smallest_oversize_blocks_go_first,
    ],
)
def test_a_wrong_rule_of_the_oversize_range_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_all("torch_npu, max_split and cap")
