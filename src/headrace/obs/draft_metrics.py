"""Results of drafts, by drafter and by place, under vLLM's name if it has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from ..base.drafted import Verified
from .instruments import Exposition, Labelled


class DraftMetrics:
    """Counters of the drafts of one engine. Belongs to one thread."""

    def __init__(self) -> None:
        self._places = Labelled()
        self._tokens = Labelled()
        self._accepted = Labelled()
        self._seconds = Labelled("saved", "spent", "vain")

    def verified(self, one: Verified) -> None:
        """Count the verified drafts of one sequence in a step."""
        for place in range(one.accepted):
            self._places.add(str(place))
        self._tokens.add(one.drafter, one.tried)
        self._accepted.add(one.drafter, one.accepted)
        self._seconds.add("saved", one.saved)
        self._seconds.add("spent", one.spent)
        self._seconds.add("vain", one.spent * (1 - one.accepted / one.tried))

    def families(self, x: Exposition) -> Iterator[Metric]:
        """Yield all of them, as they are now."""
        place = "vllm:spec_decode_num_accepted_tokens_per_pos"
        for help_, label, values, name in (
            ("Drafts accepted, by place among those of a step.", "position", self._places, place),
            ("Drafts verified.", "drafter", self._tokens, "headrace:draft_tokens"),
            ("Drafts accepted.", "drafter", self._accepted, "headrace:accepted_draft_tokens"),
            ("Predicted time of drafts.", "kind", self._seconds, "headrace:draft_seconds"),
        ):
            yield from x.counters(help_, label, values, name)
