"""Independent oracle of an open step: gradients of rollouts that arrive in several adds, before the step's N is known.

With a guess c of N, and the factor m of a document's denominator that its own rollout or prompt group determines:

    add:      G += sum_t grad loss_t / (c m)
    close:    G := G c / N, then the documents of the rest add sum_t grad loss_t / delta with the step's denominators

    sample_mean: N = N_r, m = max(M_rollout, 1)     constant:    N = N_r, m = L
    prompt_mean: N = P,   m = max(M_prompt, 1)      token_mean:  N = T,   m = 1
    root_length: N = N_r or T, m = sqrt(R)

N counts all rollouts, prompt groups or tokens of the objective (scheduled), those with a trained token (live), or those
that a correction keeps (kept), which may be known after the forward only.
"""

from collections.abc import Sequence

import numpy as np
import step_oracle
import token_oracle
from step_oracle import POLICY, Document, Settings


def number(documents: Sequence[Document], settings: Settings) -> int:
    """N of the step."""
    units: dict[object, int] = {}
    for i, document in enumerate(documents):
        rows = document.rows(POLICY)
        if rows is None:
            continue
        by_prompt = settings.aggregation == "prompt_mean"
        unit = document.prompt_id if by_prompt else step_oracle.rollout_of(documents, i)
        units[unit] = units.get(unit, 0) + _counted(document, rows, settings)
    by = settings.step_mean if settings.aggregation == "root_length" else settings.aggregation
    if by == "token_mean":
        return max(sum(units.values()), 1)
    return sum(1 for tokens in units.values() if tokens or settings.denominator == "scheduled")


def _counted(document: Document, rows: np.ndarray, settings: Settings) -> int:
    if settings.denominator != "kept" or not len(rows):
        return len(rows)
    tokens = document.tokens(rows, settings.temperature, "old", "advantages", "rollout")
    _, kappa = token_oracle.correction(settings.correction, tokens, *settings.bounds)
    return int(kappa.sum())


def gradients(
    adds: Sequence[Sequence[Document]], rest: Sequence[Document], settings: Settings, expected: int
) -> list[np.ndarray]:
    """[R, V] of each document of the adds, in their order, and then of the rest.

    An add sees its documents alone. Their weights 1 / (N_add m) become 1 / (c m).
    """
    every = [document for add in adds for document in add] + list(rest)
    total = number(every, settings)
    found = []
    for add in adds:
        own = number(add, settings)
        if any(len(rows) for d in add if (rows := d.rows(POLICY)) is not None):
            alone = step_oracle.run(add, settings).gradients
        else:
            alone = [np.zeros(np.shape(document.logits)) for document in add]
        provisional = [gradient * (own / expected) for gradient in alone]
        found += [gradient * (expected / total) for gradient in provisional]
    return found + (step_oracle.run(every, settings).gradients[len(found) :] if rest else [])
