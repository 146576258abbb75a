"""Stop strings in a text that grows, found by an automaton (Aho and Corasick)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string stands in a text: at characters ``start`` to ``end``."""

    start: int
    end: int


class StopStrings:
    """The automaton of some stop strings: a character costs the same however many they are.

    A node stands for a beginning of a stop string; node 0 is the empty one. They are numbered
    in the order of the sorted strings, so the first child of a node is the node after it. Once
    built, nothing here changes: many ``StopCursor`` may share it.

    Args:
        stops: non-empty strings.

    Attributes:
        longest: characters of the longest one.
        depths: characters of each node's beginning.
        shorter: for each node, the longest other beginning that it ends in.
        matches: for each node, characters of the longest stop string that it ends in, or 0.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.longest = max(map(len, stops), default=0)
        self.depths = array("i", [0])
        self._characters = [""]
        # Children that are not the node after their parent.
        self._branches: dict[tuple[int, str], int] = {}
        parents, ends = self._insert(stops)
        self.shorter = array("i", [0]) * len(self.depths)
        self.matches = array("i", [0]) * len(self.depths)
        for node in sorted(range(1, len(self.depths)), key=self.depths.__getitem__):
            if parents[node]:
                self.shorter[node] = self.next(self.shorter[parents[node]], self._characters[node])
            own = self.depths[node] if node in ends else 0
            self.matches[node] = own or self.matches[self.shorter[node]]

    def next(self, node: int, character: str) -> int:
        """The node of the longest beginning that a text ends in, one character on."""
        while True:
            child = self._child(node, character)
            if child or not node:
                return child
            node = self.shorter[node]

    def _child(self, node: int, character: str) -> int:
        """A node's child for a character; 0 if there is none."""
        first = node + 1
        if first < len(self.depths) and self.depths[first] > self.depths[node]:
            if self._characters[first] == character:
                return first
            return self._branches.get((node, character), 0)
        return 0

    def _insert(self, stops: tuple[str, ...]) -> tuple[array[int], set[int]]:
        """Make the nodes; each one's parent, and those that stand for whole strings."""
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
    """One text's way through the automaton.

    It finds the stop string that a reader of single characters would meet first: the one that
    ends first, and the longest of several.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._length = 0

    def feed(self, piece: str, *, judged: bool) -> StopMatch | None:
        """Read what the text grew by, up to the first stop string that ends in it.

        Args:
            piece: the new characters.
            judged: whether stop strings that end in them count.
        """
        for character in piece:
            self._node = self._stops.next(self._node, character)
            self._length += 1
            size = self._stops.matches[self._node]
            if judged and size:
                return StopMatch(self._length - size, self._length)
        return None

    @property
    def num_held(self) -> int:
        """Characters at the text's end that a stop string which is not whole may take back."""
        depth = self._stops.depths[self._node]
        if depth and depth == self._stops.longest:
            return self._stops.depths[self._stops.shorter[self._node]]
        return depth
