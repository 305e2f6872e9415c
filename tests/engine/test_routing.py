"""The policies of the live router and of the simulator, by what they are told."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.simulator.routing import LeastLoaded, PrefixAffinity


@dataclass
class Asked:
    prefixes: list[int]


@dataclass
class Place:
    number: int
    load: int = 0


@dataclass
class Server(Place):
    """Holds what it was sent, up to so many prefixes."""

    most: int = 1 << 30
    held: dict[int, None] = field(default_factory=dict)

    def take(self, keys: list[int]) -> tuple[list[int], list[int]]:
        """(held now, gone) of one request."""
        for key in keys:
            self.held.pop(key, None)
            self.held[key] = None
        gone = []
        while len(self.held) > self.most:
            gone.append(next(iter(self.held)))
            del self.held[gone[-1]]
        return [key for key in keys if key in self.held], gone


def test_what_is_told_decides_and_not_what_was_sent() -> None:
    places = [Place(0), Place(1), Place(2)]
    policy = PrefixAffinity()
    asked = Asked([1, 2, 3])
    assert policy.choose(asked, places) is places[1]
    policy.told(1, [], [])
    policy.told(2, [1, 2], [])
    assert policy.choose(asked, places) is places[2], "the other is idle and holds nothing of it"
    policy.told(0, [1, 2, 3], [])
    assert policy.choose(asked, places) is places[0], "the longest"
    policy.told(0, [], [3, 2])
    places[2].load = 2
    assert policy.choose(asked, places) is places[2], "still the longest, and within the bound"
    places[2].load = 9
    assert policy.choose(asked, places) is not places[2], "but not at any price"
    policy.silent(2)
    places[2].load = 0
    assert policy.choose(Asked([1]), places) is places[0]


def test_a_request_at_work_is_followed_before_its_server_speaks() -> None:
    places = [Place(0), Place(1)]
    policy = PrefixAffinity()
    for place in places:
        policy.told(place.number, [], [])
    first = policy.choose(Asked([7]), places)
    first.load = 1
    for _ in range(3):
        assert policy.choose(Asked([7, 8]), places) is first
    first.load = 0  # It failed: nothing was told.
    others = {policy.choose(Asked([7]), places).number for _ in range(2)}
    assert others == {0, 1}, "as if nobody had it"


@given(st.integers(0, 2**32), st.integers(2, 9), st.sampled_from((8, 40, 1 << 30)))
def test_a_router_that_listens_from_the_middle_decides_as_the_one_before_it(
    seed: int, servers: int, most: int
) -> None:
    """Two routers, of which one was restarted: what they know is what servers hold, and no more."""
    chances = random.Random(seed)
    places = [Server(n, most=most) for n in range(servers)]
    old = PrefixAffinity()
    for place in places:
        old.told(place.number, [], [])
    for _ in range(60):
        family, length = chances.randrange(8), chances.randrange(1, 9)
        keys = [family * 100 + n for n in range(length)]
        chosen = old.choose(Asked(keys), places)
        old.told(chosen.number, *chosen.take(keys))
    new = PrefixAffinity()
    for place in places:
        new.told(place.number, list(place.held), [])
    for family in range(8):
        keys = [family * 100 + n for n in range(9)]
        having = [[place for place in places if key in place.held] for key in keys]
        longest = [found for found in having if found][-1:]
        for policy in (old, new):
            chosen = policy.choose(Asked(keys), places)
            assert not longest or chosen in longest[0]


@given(st.integers(0, 2**32), st.sampled_from((1, 4, 16, 64)))
def test_no_prefix_in_common_spreads_as_least_loaded_does(seed: int, at_work: int) -> None:
    """Whatever the pacing: with nothing to find, load alone decides."""
    chances = random.Random(seed)
    fleets = {policy: [Place(n) for n in range(5)] for policy in (PrefixAffinity(), LeastLoaded())}
    for policy, places in fleets.items():
        if isinstance(policy, PrefixAffinity):
            for place in places:
                policy.told(place.number, [], [])
    running: list[list[Place]] = []
    for number in range(200):
        asked = Asked([number * 10 + n for n in range(3)])
        running.append([policy.choose(asked, places) for policy, places in fleets.items()])
        for one in running[-1]:
            one.load += 1
        if len(running) >= at_work:
            for one in running.pop(chances.randrange(len(running))):
                one.load -= 1
        spreads = [sorted(place.load for place in places) for places in fleets.values()]
        assert spreads[0] == spreads[1]


def test_a_prefix_costs_less_than_200_bytes() -> None:
    policy = PrefixAffinity()
    keys = [random.Random(1).getrandbits(64) for _ in range(100_000)]
    for n, key in enumerate(keys):
        policy.told(n % 1000, [key], [])
    size = sys.getsizeof(policy._held) + sum(map(sys.getsizeof, policy._held))
    assert size / len(keys) < 200
