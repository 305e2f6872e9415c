"""Logits to tokens, vectorised over rows: penalties, filters, the draw, log-probabilities.

Order, as in vLLM: masks (grammar, `min_tokens`), logit bias, penalties (repetition, frequency,
presence), temperature, min-p, top-k, top-p, draw. Each filter judges the result of the preceding
ones: top-p takes its share of the mass that min-p and top-k kept.

Every filter is a threshold on a row's scaled logits, so equal logits stay or go together. No result
depends on a sort's order of ties. The draw inverts the cumulative distribution in token order at
one uniform number per row, which is a hash of seed, choice and position: the text of a seeded
request is a function of its prompt and parameters alone.
"""

from __future__ import annotations

import torch

from .draws import Drawing, DrawParameters, LogprobColumns

CANDIDATES = 1024
"""Most likely tokens that top-p examines before it sorts the vocabulary."""


def penalise(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    prompt_lengths: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Penalise logits [R, V] of rows whose tokens [R, L] hold `lengths` [R] valid ids.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative logits of tokens that
    stand in prompt or output; frequency is subtracted once per appearance in the output, presence
    once if there is any.
    """
    rows, vocabulary = logits.shape
    places = torch.arange(tokens.shape[1], device=tokens.device)
    # Tokens that are not to be counted go to a column after the vocabulary.
    spare = torch.tensor(vocabulary, device=tokens.device)
    known = torch.where(places < lengths.unsqueeze(1), tokens.long(), spare)
    output = torch.where(places >= prompt_lengths.unsqueeze(1), known, spare)
    seen = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, known, True)[:, :vocabulary]
    counts = torch.zeros(rows, vocabulary + 1, device=logits.device)
    counts = counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.float32))
    counts = counts[:, :vocabulary]
    factor = torch.where(seen, repetition.unsqueeze(1), 1.0)
    # In place if possible: a plan counts `worker.step_memory.SAMPLING_COPIES` of these.
    divided = logits / factor
    found = torch.where(logits > 0, divided, factor.mul_(logits), out=factor)
    found -= torch.mul(counts, frequency.unsqueeze(1), out=divided)
    found -= torch.mul(counts > 0, presence.unsqueeze(1), out=divided)
    return found


def draw(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Draw one token per row: logits [R, V] fp32 → tokens [R] int64."""
    scaled = logits / parameters.temperature.unsqueeze(1)
    peaks = scaled.amax(-1)
    threshold = peaks + parameters.min_p.log()
    width = _candidates(parameters, scaled.shape[1])
    if width == 0:
        return _draw_all(scaled, peaks, threshold, parameters.uniform)
    values, ids = scaled.topk(width)
    if parameters.top_k is not None:
        threshold = torch.maximum(threshold, _top_k_threshold(values, parameters.top_k))
    if parameters.top_p is not None:
        threshold = _top_p_threshold(scaled, values, peaks, threshold, parameters)
    # If the last candidate is below the threshold, the candidates include all kept tokens.
    inside = values[:, -1] < threshold
    if width == scaled.shape[1] or bool(inside.all()):
        return _draw_candidates(values, ids, peaks, threshold, parameters.uniform)
    tokens = torch.empty_like(ids[:, 0])
    for part, drawn in ((inside, True), (~inside, False)):
        rows = part.nonzero().squeeze(1)
        if not len(rows):
            continue
        shared = (peaks[rows], threshold[rows], parameters.uniform[rows])
        tokens[rows] = (
            _draw_candidates(values[rows], ids[rows], *shared)
            if drawn
            else _draw_all(scaled[rows], *shared)
        )
    return tokens


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        # Vectorised, unlike torch's; and without waking threads for a row.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


REFERENCE = Drawing(draw, _argmax)


def _candidates(parameters: DrawParameters, vocabulary: int) -> int:
    """Return the number of largest logits that the filters need; 0: no filter is on."""
    width = 0 if parameters.top_k is None else int(parameters.top_k.max())
    if parameters.top_p is not None and bool((parameters.top_p < 1).any()):
        width = max(width, CANDIDATES)
    return min(width, vocabulary)


def _top_k_threshold(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    last = (top_k - 1).clamp(0, values.shape[1] - 1)
    kth = values.gather(1, last.unsqueeze(1)).squeeze(1)
    return torch.where(top_k > 0, kth, float("-inf"))


def _top_p_threshold(
    scaled: torch.Tensor,
    values: torch.Tensor,
    peaks: torch.Tensor,
    threshold: torch.Tensor,
    parameters: DrawParameters,
) -> torch.Tensor:
    """Raise thresholds to the last token of the nucleus (Holtzman et al. 2019).

    A token is in it if the mass of the more likely ones is below top_p of the kept mass.
    """
    active = (parameters.top_p < 1).nonzero().squeeze(1)
    if not len(active):
        return threshold
    result = threshold.clone()
    wanted = parameters.top_p[active].double()
    kept = threshold[active].unsqueeze(1)
    peak = peaks[active].unsqueeze(1)
    everything = _masses(scaled[active], peak, kept)
    target = wanted * everything.sum(-1)
    ordered = values[active]
    cumulative = _masses(ordered, peak, kept).cumsum(-1)
    short = (cumulative[:, -1] < target) & (values.shape[1] < scaled.shape[1])
    result[active] = _nucleus_end(ordered, cumulative, target, kept)
    rows = short.nonzero().squeeze(1)
    if len(rows):
        # The candidates do not hold the nucleus: a flat distribution, sorted in full.
        ordered = scaled[active[rows]].sort(-1, descending=True).values
        cumulative = _masses(ordered, peak[rows], kept[rows]).cumsum(-1)
        result[active[rows]] = _nucleus_end(ordered, cumulative, target[rows], kept[rows])
    return result


def _nucleus_end(
    ordered: torch.Tensor, cumulative: torch.Tensor, target: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Return the value of the first token at which the cumulative mass reaches the target."""
    last = (cumulative < target.unsqueeze(1)).sum(-1, keepdim=True)
    last = last.clamp_max(ordered.shape[1] - 1)
    return torch.maximum(ordered.gather(1, last), kept).squeeze(1)


def _masses(scaled: torch.Tensor, peak: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return unnormalised probabilities in fp64; zero below the threshold."""
    return (scaled - peak).exp_().masked_fill_(scaled < threshold, 0.0).double()


def _draw_all(
    scaled: torch.Tensor, peaks: torch.Tensor, threshold: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    return _invert(_masses(scaled, peaks.unsqueeze(1), threshold.unsqueeze(1)), uniform)


def _draw_candidates(
    values: torch.Tensor,
    ids: torch.Tensor,
    peaks: torch.Tensor,
    threshold: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw as `_draw_all` does, without the zeros: the same masses in the same order."""
    ids, order = ids.sort(-1)
    masses = _masses(values.gather(1, order), peaks.unsqueeze(1), threshold.unsqueeze(1))
    return ids.gather(1, _invert(masses, uniform).unsqueeze(1)).squeeze(1)


def _invert(masses: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the index [R] at which the cumulative masses [R, V] pass `uniform` of their sum."""
    cumulative = masses.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True)
    # The product may round up to the sum: then take the last place with any mass. A row with NaN
    # logits has no such place: it gets an arbitrary token; the others are not affected.
    last = torch.searchsorted(cumulative, total).clamp_max(masses.shape[1] - 1)
    return torch.minimum(found, last).squeeze(1)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> LogprobColumns:
    """Return log-probabilities of `tokens` [R] and of the `top` most likely, by raw logits [R,
    V]."""
    norm = torch.logsumexp(logits, -1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > own).sum(-1) + 1
    values, ids = _most_likely(logits, top)
    return LogprobColumns(
        (own - norm).squeeze(1).tolist(), ranks.tolist(), ids.tolist(), (values - norm).tolist()
    )


def _most_likely(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, ids [R, top], ordered as in `LogprobColumns`; `topk` leaves the order of ties
    open."""
    values, ids = logits.topk(top)
    if top == 0:
        return values, ids
    ids = ids.sort(-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    # If others equal to the last one were left out, these may have smaller ids.
    last = values[:, -1:]
    open_end = ((logits == last).sum(-1) > (values == last).sum(-1)).nonzero().squeeze(1)
    if len(open_end):
        ordered = logits[open_end].sort(dim=-1, descending=True, stable=True)
        ids[open_end] = ordered.indices[:, :top]
    return values, ids
