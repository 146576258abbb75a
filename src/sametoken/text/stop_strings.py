"""Stop strings in a growing text, found by an Aho-Corasick automaton."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string's place in a text: characters ``start`` to ``end``."""

    start: int
    end: int


class StopStrings:
    """An immutable Aho-Corasick automaton: a character's cost is independent of the string count.

    Each node is a prefix of a stop string; node 0 is the empty one. Nodes are numbered in the
    order of the sorted strings, so the first child of a node is the next node. Several
    ``StopCursor`` may share it.

    Args:
        stops: non-empty strings.

    Attributes:
        longest: length of the longest stop string in characters.
        depths: length of each node's prefix.
        failure: the failure link of each node: the longest other prefix that is its suffix.
        matches: for each node, the length of the longest stop string that is its suffix, or 0.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.longest = max(map(len, stops), default=0)
        self.depths = array("i", [0])
        self._characters = [""]
        # Children other than the node after their parent.
        self._branches: dict[tuple[int, str], int] = {}
        parents, ends = self._insert(stops)
        self.failure = array("i", [0]) * len(self.depths)
        self.matches = array("i", [0]) * len(self.depths)
        for node in sorted(range(1, len(self.depths)), key=self.depths.__getitem__):
            if parents[node]:
                self.failure[node] = self.next(self.failure[parents[node]], self._characters[node])
            own = self.depths[node] if node in ends else 0
            self.matches[node] = own or self.matches[self.failure[node]]

    def next(self, node: int, character: str) -> int:
        """The state after one more character: the longest prefix that the text ends in."""
        while True:
            child = self._child(node, character)
            if child or not node:
                return child
            node = self.failure[node]

    def _child(self, node: int, character: str) -> int:
        """A node's child by a character; 0 if there is none."""
        first = node + 1
        if first < len(self.depths) and self.depths[first] > self.depths[node]:
            if self._characters[first] == character:
                return first
            return self._branches.get((node, character), 0)
        return 0

    def _insert(self, stops: tuple[str, ...]) -> tuple[array[int], set[int]]:
        """Add the nodes of a trie; returns each node's parent, and the nodes of whole strings."""
        parents, ends = array("i", [0]), set()
        path, before = [0], ""
        for stop in sorted(set(stops)):
            pairs = enumerate(zip(before, stop, strict=False))
            common = next((i for i, (one, other) in pairs if one != other), len(before))
            del path[common + 1 :]
            for depth, character in enumerate(stop[common:], common + 1):
                node, parent = len(self.depths), path[-1]
                if parent + 1 != node:
                    self._branches[parent, character] = node
                self.depths.append(depth)
                self._characters.append(character)
                parents.append(parent)
                path.append(node)
            ends.add(path[-1])
            before = stop
        return parents, ends


class StopCursor:
    """The automaton's state for one text.

    It finds the stop string that ends first, and the longest of several that end there.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._length = 0

    def feed(self, piece: str, *, checked: bool) -> StopMatch | None:
        """Read new characters, up to the first stop string that ends in them, if ``checked``."""
        for character in piece:
            self._node = self._stops.next(self._node, character)
            self._length += 1
            size = self._stops.matches[self._node]
            if checked and size:
                return StopMatch(self._length - size, self._length)
        return None

    @property
    def num_held(self) -> int:
        """Characters at the text's end that may turn out to be part of a stop string."""
        depth = self._stops.depths[self._node]
        if depth and depth == self._stops.longest:
            return self._stops.depths[self._stops.failure[self._node]]
        return depth
