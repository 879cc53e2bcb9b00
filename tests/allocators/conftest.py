"""What the registries bring, with the variants worth testing apart: device allocators, and legal pairs of both kinds.

The fixtures ``device_setup`` and ``kv_setup`` run a test over all of them; a new allocator or policy, growth or
retention rule is among them by being registered. Settings of its own that are worth varying stand in the tables below.

Full products explode (5,760 contiguous setups), so setups are chosen *pairwise*: every two values of two different
settings, the arena and the layout among them, meet in at least one setup. Most faults need no more than two settings
to show (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any, get_args

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy
from hbmtwin.allocators.growth import GROWTH_RULES
from hbmtwin.allocators.kv_groups import Grouping, KVGroup, one_group
from hbmtwin.allocators.pooled import Coalescing, Fit
from hbmtwin.allocators.records import KVDtype, KVLayout
from hbmtwin.allocators.registry import device_allocators, kv_policies
from hbmtwin.allocators.retention import RETENTIONS

MAX_MODEL_LEN = 128
MIB = 1 << 20
PAGE_BYTES = 4096
"""Granularity of the driver."""

LAYOUTS = {
    "k and v": KVLayout(num_layers=3, num_kv_heads=1, head_dim=512),
    "int8 k with scales, 16-bit v": KVLayout(
        num_layers=3, num_kv_heads=1, head_dim=768, dtype=KVDtype(8, "token"), v_head_dim=512, v_dtype=KVDtype(16)
    ),
    "latent": KVLayout(num_layers=4, num_kv_heads=1, head_dim=576, v_head_dim=0),
}
"""6,144, 5,388 and 4,608 bytes a token: the longest sequence in one buffer stays below 1 MiB, torch's small pool."""

Value = dict[str, Any]
"""One value of a factor: the settings that it stands for."""

ALIGNMENTS: list[Value] = [{"alignment_bytes": 512}, {"alignment_bytes": 4096}]
DEVICE_FACTORS: dict[str, list[list[Value]]] = {
    "caching": [
        [{"flavour": "torch_npu"}, {"flavour": "torch_cuda"}],
        [
            {"alloc_conf": conf}
            for conf in (
                "",
                "expandable_segments:True",
                "max_split_size_mb:20,garbage_collection_threshold:0.4",
                "roundup_power2_divisions:4",
            )
        ],
    ],
    "pooled": [[{"fit": fit} for fit in get_args(Fit)], [{"coalescing": c} for c in get_args(Coalescing)], ALIGNMENTS],
    "buddy": [ALIGNMENTS],
    "tlsf": [ALIGNMENTS, [{"second_level_log2": 5}, {"second_level_log2": 3}]],
    "bump": [ALIGNMENTS],
}
"""What is worth varying of the device allocators that there are; another one has its defaults."""

KV_FACTORS: dict[str, list[list[Value]]] = {
    "contiguous": [
        [
            *({"growth": name} for name in GROWTH_RULES if name != "hybrid"),
            *({"growth": "hybrid", "decode_growth": name} for name in GROWTH_RULES if name != "hybrid"),
        ],
        # Each rule takes as many of these numbers as it has: truncate(40), forget(40, 16), ...
        [{"retention": str(rule(*(40, 16)[: len(fields(rule))]))} for rule in RETENTIONS.values()],
        [{"tensors": "per_layer"}, {"tensors": "merged"}],
        [{"copy_scope": "tensor"}, {"copy_scope": "step"}],
        [{"admission": "none"}, {"admission": "reserve"}],
    ],
    "paged": [
        [{"block_size": 16}, {"block_size": 4}],
        [{"watermark": 0.0}, {"watermark": 0.1}],
        [{"reserve_full_sequence": True}, {"reserve_full_sequence": False}],
    ],
    "paged_v0": [
        [{"block_size": 16}, {"block_size": 4}],
        [{"watermark": 0.0}, {"watermark": 0.1}],
        [{"swap_space_bytes": 1 << 20}, {"swap_space_bytes": 0}],
    ],
    "paged_groups": [
        [{"grouping": "one"}, {"grouping": "two block sizes"}, {"grouping": "states"}],
        [{"watermark": 0.0}, {"watermark": 0.1}],
        [{"reserve_full_sequence": True}, {"reserve_full_sequence": False}],
    ],
    "radix": [[{"block_size": 16}, {"block_size": 1}]],
    "virtual": [[{"page_bytes": PAGE_BYTES}, {"page_bytes": 8 * PAGE_BYTES}]],
}
"""What is worth varying of the KV policies that there are; of another one, the arena and the layout vary."""


def _two_block_sizes(layout: KVLayout) -> Grouping:
    """One layer sees all, the others have a window of more than any sequence here, since all tokens are to be held."""
    token_bytes = layout.layer_token_bytes
    window = KVGroup(kind="sliding_window", window=4 * MAX_MODEL_LEN, block_size=8, token_bytes=token_bytes)
    groups = (KVGroup(block_size=16, token_bytes=token_bytes), *[window] * (layout.num_layers - 1))
    return Grouping(groups=groups, group_length=1, page_bytes=16 * token_bytes)


def _states(layout: KVLayout) -> Grouping:
    """Mamba layers between those of *layout*."""
    one = one_group(layout, 16)
    state = KVGroup(kind="mamba", num_layers=layout.num_layers - 1, block_size=MAX_MODEL_LEN, state_bytes=5000)
    return Grouping(groups=(state, *one.groups), group_length=one.group_length, page_bytes=one.page_bytes)


GROUPINGS: dict[str, Callable[[KVLayout], Grouping]] = {
    "one": lambda layout: one_group(layout, 16),
    "two block sizes": _two_block_sizes,
    "states": _states,
}


def pairwise(factors: Sequence[Sequence[Value]]) -> list[Value]:
    """Combinations in which every two values of two factors meet: greedy, always the same. O(pairs * values)."""
    places = [range(len(values)) for values in factors]
    width = min(2, len(factors))
    wanted = dict.fromkeys(
        tuple(zip(some, values, strict=True))
        for some in combinations(range(len(factors)), width)
        for values in product(*(places[factor] for factor in some))
    )
    rows: list[dict[int, int]] = []
    while wanted:
        row = dict(next(iter(wanted)))
        for factor in range(len(factors)):
            if factor not in row:
                row[factor] = max(
                    places[factor],
                    key=lambda value, factor=factor, row=row: sum(
                        tuple(sorted(((factor, value), other))) in wanted for other in row.items()
                    ),
                )
        for met in combinations(sorted(row.items()), width):
            wanted.pop(met, None)
        rows.append(row)
    chosen = [[factors[factor][value] for factor, value in sorted(row.items())] for row in rows]
    return [{name: setting for value in row for name, setting in value.items()} for row in chosen]


@dataclass(frozen=True)
class DeviceSetup:
    """A device allocator, and the settings that it is made with."""

    name: str
    settings: Mapping[str, Any]

    def make(self, driver: HbmDriver, limit_bytes: int, cls: type[DeviceAllocator] | None = None) -> Any:
        """One over *driver* that may take *limit_bytes* of it."""
        made: Any = cls or device_allocators.get(self.name)
        return made(driver, made.Config(limit_bytes=limit_bytes, **self.settings))

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.settings.values())])


@dataclass(frozen=True)
class KVSetup:
    """A policy, its arena, and the layout and settings that it is made with."""

    policy: str
    arena: str
    layout_name: str
    settings: Mapping[str, Any]

    @property
    def layout(self) -> KVLayout:
        return LAYOUTS[self.layout_name]

    @property
    def may_refuse_to_abort(self) -> bool:
        """Whether a step may begin to replace tensors one by one, which cannot be undone."""
        return self.settings.get("copy_scope") == "tensor"

    def make(self, memory_bytes: int, cls: type[KVPolicy] | None = None) -> Any:
        """The policy over an arena of *memory_bytes*; an arena that never reuses bytes gets eight times as many.

        As in a run, each field of its ``Config`` that has a known name is filled. A pool's blocks take half of the
        memory, since an arena may round each of its tensors up to twice its size.
        """
        arena_class: Any = device_allocators.get(self.arena)
        policy_class: Any = cls or kv_policies.get(self.policy)
        arena_bytes = memory_bytes * 8 if "monotonic" in arena_class.features else memory_bytes
        # What else the device has is never given: a cap below the capacity is what servers have.
        driver = HbmDriver(2 * arena_bytes, page_bytes=PAGE_BYTES)
        arena = arena_class(driver, arena_class.Config(limit_bytes=arena_bytes))
        block_size = self.settings.get("block_size", 16)
        known = {
            "max_model_len": MAX_MODEL_LEN,
            "limit_bytes": memory_bytes,
            "block_size": block_size,
            "num_blocks": memory_bytes // 2 // (block_size * self.layout.token_bytes),
            "page_bytes": PAGE_BYTES,
            "initial_tokens": 16,
            "step_tokens": 24,
        }
        names = {field.name for field in fields(policy_class.Config)}
        settings = {name: value for name, value in known.items() if name in names} | dict(self.settings)
        if "grouping" in settings:
            settings["grouping"] = grouping = GROUPINGS[settings["grouping"]](self.layout)
            settings["num_blocks"] = memory_bytes // 2 // grouping.block_bytes
        return policy_class(self.layout, arena, policy_class.Config(**settings))

    def __str__(self) -> str:
        return "-".join([self.policy, self.arena, self.layout_name, *map(str, self.settings.values())])


def setups_of(policy: str) -> list[KVSetup]:
    """The setups of one policy over all arenas that offer what it requires."""
    requires = kv_policies.get(policy).requires
    arenas = [{"arena": name} for name, cls in device_allocators if requires <= cls.features]
    layouts = [{"layout": name} for name in LAYOUTS]
    rows = pairwise([arenas, layouts, *KV_FACTORS.get(policy, [])])
    return [KVSetup(policy, row.pop("arena"), row.pop("layout"), row) for row in rows]


DEVICE_SETUPS = [
    DeviceSetup(name, row) for name in device_allocators.names() for row in pairwise(DEVICE_FACTORS.get(name, []))
]
KV_SETUPS = [setup for name in kv_policies.names() for setup in setups_of(name)]


@pytest.fixture(params=DEVICE_SETUPS, ids=str)
def device_setup(request: pytest.FixtureRequest) -> DeviceSetup:
    """Each device allocator in turn, in each of its variants."""
    return request.param


@pytest.fixture
def device_setup_of() -> type[DeviceSetup]:
    """For a test that wants one of its own."""
    return DeviceSetup


@pytest.fixture(params=KV_SETUPS, ids=str)
def kv_setup(request: pytest.FixtureRequest) -> KVSetup:
    """Each setup of a KV policy in turn."""
    return request.param


@pytest.fixture
def kv_setups() -> list[KVSetup]:
    """All setups of KV policies."""
    return KV_SETUPS


@pytest.fixture
def kv_setup_of() -> type[KVSetup]:
    """For a test that wants one setup of its own."""
    return KVSetup
