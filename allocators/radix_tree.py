"""A radix tree over tokens, cut to whole pages: who has computed a prefix leaves its pages here, for others to find.

::

    root
     +- sys 0..7            pages 1 2      2 locks   (two sequences run behind it)
     |   +- a 0..3          page  3        1 lock
     |   +- b 0..11         pages 4 5 6    1 lock
     +- c 0..15             pages 7 8 9 10           an unlocked leaf: it can be evicted, as a whole

A node's key is a run of tokens, told as spans in the fewest pieces; a child is found by the tokens of its first page.
The rules are those of SGLang's ``RadixCache`` 0.5.23. Access times are ticks of a counter: a node further down the path
gets the later one, and no two nodes have the same.

Complexity: match and insert O(pieces of the prompt + nodes of its path), lock and unlock O(nodes of the path), evict
O(nodes evicted * log(leaves)) amortised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Literal, get_args

from hbmtwin.allocators.records import Span

Spans = tuple[Span, ...]
EvictionPolicy = Literal["lru", "lfu", "slru"]
"""Which unlocked leaf goes first. ``lru``: the one not passed for longest. ``lfu``: the one with the fewest hits, of
equal ones the least recent. ``slru``: the least recent of those with less than two hits, then of the others."""
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
PROTECTED_HITS = 2


class Node:
    """A run of whole pages behind those of its parent."""

    __slots__ = ("children", "hits", "locks", "pages", "parent", "queued", "spans", "touched")

    def __init__(self, parent: Node | None, spans: Spans, pages: list[int]) -> None:
        self.parent = parent
        self.spans = spans
        self.pages = pages
        self.children: dict[Spans, Node] = {}
        self.locks = 0
        """Sequences that run behind it or on it."""
        self.hits = 0
        """Requests that have put it or gone through it when they put something: look-ups do not count."""
        self.touched = 0
        self.queued = False
        """Whether it has an entry in the heap of leaves."""

    def path(self) -> Iterator[Node]:
        """From here up, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Reader:
    """Stands in the tokens of a sequence. Pieces that continue each other are merged: equal tokens, equal spans."""

    __slots__ = ("_offset", "_place", "_spans", "left")

    def __init__(self, spans: Iterable[Span], tokens: int) -> None:
        self._spans: list[Span] = []
        self._place = self._offset = 0
        self.left = 0
        """Tokens from here: at most *tokens*, fewer where the spans end before."""
        for stream, start, length in spans:
            taken = min(length, tokens - self.left)
            if taken <= 0:
                continue
            last = self._spans[-1] if self._spans else None
            if last is not None and last[0] == stream and last[1] + last[2] == start:
                self._spans[-1] = (stream, last[1], last[2] + taken)
            else:
                self._spans.append((stream, start, taken))
            self.left += taken

    def ahead(self, tokens: int) -> Spans:
        """The next *tokens*, without moving."""
        found: list[Span] = []
        place, offset = self._place, self._offset
        while tokens:
            stream, start, length = self._spans[place]
            taken = min(tokens, length - offset)
            found.append((stream, start + offset, taken))
            tokens -= taken
            place, offset = place + 1, 0
        return tuple(found)

    def alike(self, spans: Spans) -> int:
        """How many of the next tokens are the first of *spans*, without moving."""
        tokens, place, offset = 0, self._place, self._offset
        for stream, start, length in spans:
            if place == len(self._spans):
                break
            mine = self._spans[place]
            if mine[0] != stream or mine[1] + offset != start:
                break
            tokens += min(length, mine[2] - offset)
            if length != mine[2] - offset:
                break
            place, offset = place + 1, 0
        return tokens

    def skip(self, tokens: int) -> None:
        """Move on."""
        self.left -= tokens
        while tokens:
            rest = self._spans[self._place][2] - self._offset
            if tokens < rest:
                self._offset += tokens
                return
            tokens -= rest
            self._place, self._offset = self._place + 1, 0


class RadixTree:
    """Nodes, their locks, and which leaf goes next. Pages are the caller's: evict tells which are free now."""

    def __init__(self, page_size: int, eviction_policy: EvictionPolicy = "lru") -> None:
        self.page_size = page_size
        self.eviction_policy = eviction_policy
        self.root = Node(None, (), [])
        self.evictable = 0
        """Pages of unlocked nodes: all of them could be evicted, for what hangs behind an unlocked node is unlocked."""
        self.locked = 0
        """Pages of locked nodes."""
        self.references = 0
        """Pages of locked nodes, once for each lock."""
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """Heap of (rank, tick, leaf). Each unlocked leaf has one entry, with its rank and tick of now or of before."""

    def match(self, spans: Iterable[Span], tokens: int) -> tuple[Node, int]:
        """The node where the whole pages of a prefix that are here end, and how many there are; *tokens* at most.

        A node in which they end is split; what was passed is touched, the rest of a split node too.
        """
        return self._walk(Reader(spans, tokens), None)

    def insert(
        self, spans: Iterable[Span], tokens: int, pages: Sequence[int], counted: int = 0
    ) -> tuple[Node, int, int]:
        """Put the whole *pages* of the first *tokens*; return the node where they end, how many of the pages were there
        before, and how many are now.

        What was there stays, and the caller's pages for the same tokens are not taken. A node that ends within the
        first *counted* tokens has counted this request before.
        """
        reader = Reader(spans, tokens)
        node, had = self._walk(reader, counted)
        whole = had + reader.left // self.page_size
        if whole > had:
            new = reader.left // self.page_size * self.page_size
            leaf = Node(node, reader.ahead(new), list(pages[had:whole]))
            node.children[reader.ahead(self.page_size)] = leaf
            self.evictable += whole - had
            if whole * self.page_size > counted:
                leaf.hits += 1
            self._touch(leaf)
            self._offer(leaf)
            node = leaf
        return node, had, whole

    def lock(self, node: Node) -> None:
        """One more sequence runs behind *node*: nothing on its path can be evicted."""
        for each in node.path():
            if not each.locks:
                self.evictable -= len(each.pages)
                self.locked += len(each.pages)
            each.locks += 1
            self.references += len(each.pages)

    def unlock(self, node: Node) -> None:
        """One less."""
        for each in node.path():
            each.locks -= 1
            self.references -= len(each.pages)
            if not each.locks:
                self.evictable += len(each.pages)
                self.locked -= len(each.pages)
                self._offer(each)

    def evict(self, pages: int) -> list[list[int]]:
        """Drop whole leaves until *pages* pages or more are free, or nothing can go; return the pages of each."""
        freed: list[list[int]] = []
        while pages > 0 and self._leaves:
            rank, tick, node = heappop(self._leaves)
            node.queued = False
            if node.locks or node.children:
                continue
            if (rank, tick) != (self._rank(node), node.touched):
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[self._first_page(node)]
            self._offer(parent)
            self.evictable -= len(node.pages)
            pages -= len(node.pages)
            freed.append(node.pages)
        return freed

    def pages_of(self, node: Node) -> list[int]:
        """Pages of the whole prefix that ends with *node*. O(pages)."""
        parts = [each.pages for each in node.path()]
        return [page for part in reversed(parts) for page in part]

    def idle(self, node: Node) -> int:
        """Pages of that prefix that nobody has locked."""
        return sum([len(each.pages) for each in node.path() if not each.locks])

    def nodes(self) -> Iterator[Node]:
        """All but the root, parents before children. O(nodes)."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _walk(self, reader: Reader, counted: int | None) -> tuple[Node, int]:
        """Go down as far as whole pages are alike. With *counted*, each node that ends behind it gets a hit."""
        node, depth, size = self.root, 0, self.page_size
        while reader.left >= size:
            child = node.children.get(reader.ahead(size))
            if child is None:
                break
            self._touch(child)
            pages = reader.alike(child.spans) // size
            reader.skip(pages * size)
            node = child if pages == len(child.pages) else self._split(child, pages)
            depth += pages
            if counted is not None and depth * size > counted:
                node.hits += 1
        return node, depth

    def _split(self, lower: Node, pages: int) -> Node:
        """Cut a node behind its first *pages*: a new one takes them, with the locks and hits of the old."""
        reader = Reader(lower.spans, len(lower.pages) * self.page_size)
        tokens = pages * self.page_size
        upper = Node(lower.parent, reader.ahead(tokens), lower.pages[:pages])
        upper.locks, upper.hits = lower.locks, lower.hits
        assert lower.parent is not None
        lower.parent.children[self._first_page(lower)] = upper
        reader.skip(tokens)
        lower.parent, lower.spans, lower.pages = upper, reader.ahead(reader.left), lower.pages[pages:]
        upper.children[self._first_page(lower)] = lower
        self._touch(upper)
        return upper

    def _first_page(self, node: Node) -> Spans:
        return Reader(node.spans, self.page_size).ahead(self.page_size)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.touched = self._clock

    def _rank(self, node: Node) -> int:
        if self.eviction_policy == "lfu":
            return node.hits
        return int(self.eviction_policy == "slru" and node.hits >= PROTECTED_HITS)

    def _offer(self, node: Node) -> None:
        """Queue a node if it is an unlocked leaf. Ranks and ticks only rise, so an older entry is never too late."""
        if node.parent is not None and not node.children and not node.locks and not node.queued:
            node.queued = True
            heappush(self._leaves, (self._rank(node), node.touched, node))

    def check(self) -> None:
        """Assert the invariants of nodes, locks, counts and leaves. O(nodes + pieces)."""
        nodes = list(self.nodes())
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[self._first_page(node)] is node
            tokens = len(node.pages) * self.page_size
            assert node.pages
            assert tokens == sum(length for _, _, length in node.spans)
            assert node.spans == Reader(node.spans, tokens).ahead(tokens), "told in the fewest pieces"
            assert node.locks >= sum(child.locks for child in node.children.values()), "a lock reaches up to the root"
            assert node.queued or node.locks or node.children, "each unlocked leaf can be evicted"
        assert len({node.touched for node in nodes}) == len(nodes)
        assert self.evictable == sum(len(node.pages) for node in nodes if not node.locks)
        assert self.locked == sum(len(node.pages) for node in nodes if node.locks)
        assert self.references == sum(len(node.pages) * node.locks for node in nodes)
        assert sorted(id(node) for _, _, node in self._leaves) == sorted(id(node) for node in nodes if node.queued)
        for rank, tick, node in self._leaves:
            assert (rank, tick) <= (self._rank(node), node.touched)
