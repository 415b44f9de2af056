"""One sampler for both backends: the next token is a pure function of logits and one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpt_parity.schedule import require_integer, require_real


def sample(
    logits: np.ndarray | Sequence[float],
    temperature: float,
    top_k: int | None,
    uniform: float,
) -> int:
    """Draw one token id from softmax(logits / temperature) by inverting its cumulative sum.

    p_i = exp((l_i - max l) / temperature) / sum_j exp((l_j - max l) / temperature)
    id  = the lowest i with p_0 + ... + p_i > uniform

    logits: (V,), any real dtype; everything is computed in float64, so that single-precision
    sums play no part. An id of probability 0 (logit -inf, or underflow) is never returned.
    temperature: 0 takes the largest logit, the lowest id among equals; infinity draws evenly
    from the ids that have a logit above -inf.
    top_k: None, or the number of ids to keep, exactly; equal logits at the last place keep the
    lowest ids; more than V keeps all.
    uniform: one number in [0, 1).

    Raises ValueError for logits that are not 1-D, are empty, hold NaN or +inf or only -inf, for
    a negative or NaN temperature, for top_k < 1 and for `uniform` outside [0, 1); TypeError for
    values that are no real numbers.
    """
    scores = _checked_logits(logits)
    temperature = require_real("temperature", temperature)
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}, 0 or more is needed")
    uniform = require_real("uniform", uniform)
    if not 0 <= uniform < 1:
        raise ValueError(f"uniform is {uniform!r}, a number in [0, 1) is needed")
    if top_k is not None:
        top_k = require_integer("top_k", top_k, 1)

    if temperature == 0:
        return int(np.argmax(scores))
    ids = np.flatnonzero(scores > -math.inf)  # (K,)
    if top_k is not None and top_k < ids.size:
        ids = np.sort(ids[np.argsort(-scores[ids], kind="stable")[:top_k]])
    if temperature == math.inf:
        weights = np.ones(ids.size)
    else:
        # Overflow to -inf and underflow to 0 are the right limits: the largest logit stays at 0.
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((scores[ids] - scores[ids].max()) / temperature)
    cumulative = np.cumsum(weights)
    # `right` steps over ids of weight 0. The largest number below 1 times the last sum rounds
    # to less than that sum, so the place found is always inside.
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(ids[place])


def _checked_logits(logits: np.ndarray | Sequence[float]) -> np.ndarray:
    array = np.asarray(logits)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"logits have shape {array.shape}, (V,) with V >= 1 is needed")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"logits have dtype {array.dtype}, real numbers are needed")
    scores = array.astype(np.float64)
    invalid = np.isnan(scores) | (scores == math.inf)
    if invalid.any():
        index = int(np.argmax(invalid))
        raise ValueError(f"logits hold {scores[index]} at id {index}, finite or -inf is needed")
    if scores.max() == -math.inf:
        raise ValueError(f"logits are -inf at all {scores.size} ids, one finite value is needed")
    return scores
