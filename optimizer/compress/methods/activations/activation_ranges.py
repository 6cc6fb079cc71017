"""Activation statistics in constant memory, and the static ranges chosen from them.

`MagnitudeHistogram` counts |x| of each sign in bins whose width is a power of two. It starts with
the width that the first values need and doubles it when a larger one arrives, adding neighbouring
bins. Because floor(floor(x / w) / 2) == floor(x / 2w), the counts are a function of the values
alone:

 1. order, batching and merging never change a histogram, bit for bit;
 2. every bin is exact, also after the range grew.

Each method turns a histogram into a `Range`. Symmetric ranges are decided on |x|; otherwise both
ends are chosen:

    minmax      all values
    percentile  the range outside which (100 - p) % of the values lie, half of them on each side;
                symmetric: the smallest t that covers p % of |x|
    entropy     the t with the least KL divergence between the distribution of |x| and its
                128-level quantization (S. Migacz, "8-bit inference with TensorRT", GTC 2017);
                not symmetric: each end is cut at t, so the longer tail alone may be
    mse         the clip with the least mean squared quantization error, as NVIDIA's and ONNX
                Runtime's calibrators search it; both ends in turn when not symmetric
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimizer.foundation.state import Range

BINS = 8192  # the largest |x| lies in the upper half of them: 4096 to 8192 are in use
SMALLEST_EXPONENT = -126  # of a bin's width, the smallest of float32's normal range
LEVELS = 128  # magnitudes of int8
ENTROPY_BINS = 2048  # bins of magnitudes
ENTROPY_CLIPS = 256  # clips that entropy tries
EMPTY = 1e-4  # count of an empty bin where a logarithm is taken
CHUNK = 1 << 20  # values binned at a time: bounds the temporaries


@dataclass
class MagnitudeHistogram:
    """Histogram of a quantized input's |x|, apart for negative and other values, with exact minimum
    and maximum, from which its static range is chosen.

    Bin i counts i * width <= |x| < (i + 1) * width, width = 2 ** exponent.
    counts: (2, BINS), negative values and the others
    low, high: smallest and largest of the values and 0
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(2, BINS, dtype=torch.int64))
    exponent: int = SMALLEST_EXPONENT
    low: float = 0.0
    high: float = 0.0

    @property
    def width(self) -> float:
        return 2.0**self.exponent

    @property
    def absmax(self) -> float:
        return max(-self.low, self.high)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def magnitudes(self) -> Tensor:
        """Counts of |x| (BINS,)."""
        return self.counts.sum(0)

    def update(self, rows: Tensor) -> None:
        """Count the calibration values of `rows`, any shape. Raises ValueError for NaN or
        infinity."""
        self.extend(rows)
        inverse = 2.0**-self.exponent
        for part in rows.reshape(-1).split(CHUNK):
            bins = (part.float().abs() * inverse).long() + BINS * (part >= 0)
            self.counts += torch.bincount(bins, minlength=2 * BINS).view(2, BINS).cpu()

    def extend(self, rows: Tensor) -> None:
        """Widen only `low` and `high` to the values of `rows`, any shape, which suffices for
        minmax. Raises ValueError for NaN or infinity."""
        if not rows.numel():
            return
        low, high = (float(t) for t in torch.aminmax(rows))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("activations hold NaN or infinity")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._grow(_exponent_for(self.absmax))

    def merge(self, other: MagnitudeHistogram) -> None:
        """Add the counts of a histogram of the same tensor on other batches."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self._grow(other.exponent)
        self.counts += _coarser(other.counts, self.exponent - other.exponent)

    def _grow(self, exponent: int) -> None:
        if exponent > self.exponent:
            self.counts = _coarser(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _exponent_for(absmax: float) -> int:
    """Choose for an activation histogram the smallest exponent of a bin width with which `absmax`
    lies in one of BINS bins."""
    return (
        max(math.frexp(absmax)[1] - int(math.log2(BINS)), SMALLEST_EXPONENT)
        if absmax
        else (SMALLEST_EXPONENT)
    )


def _coarser(counts: Tensor, doublings: int) -> Tensor:
    """Merge bins of an activation histogram: return the counts (2, BINS) at 2 ** doublings times
    the bin width, padded with empty bins."""
    if doublings == 0:
        return counts
    head = counts.reshape(2, -1, min(2**doublings, BINS)).sum(2)
    return torch.nn.functional.pad(head, (0, BINS - head.shape[1]))


@dataclass
class Channels:
    """Running largest magnitude and mean of each feature of an input on calibration data, over rows
    (tokens, features)."""

    features: int
    device: torch.device | None = None
    absmax: Tensor = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = 0
        self.absmax = torch.zeros(self.features, device=self.device)
        self._sum = torch.zeros(self.features, dtype=torch.float64, device=self.device)

    def update(self, rows: Tensor) -> None:
        """Add rows (tokens, features). Raises ValueError for NaN or infinity."""
        if not len(rows):
            return
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("activations hold NaN or infinity")
        self.absmax = torch.maximum(self.absmax, rows.abs().amax(0))
        self._sum += rows.double().sum(0)
        self.count += len(rows)

    def merge(self, other: Channels) -> None:
        """Add the sums of the same input on other batches."""
        self.absmax = torch.maximum(self.absmax, other.absmax)
        self._sum += other._sum
        self.count += other.count

    @property
    def mean(self) -> Tensor:
        """The mean (features,) float32; zeros without rows."""
        return (self._sum / max(self.count, 1)).float()


def minmax(h: MagnitudeHistogram, symmetric: bool) -> Range:
    """Choose the activation range that covers all values, without clipping; one outlier then sets
    the step for all."""
    return Range.symmetric(h.absmax) if symmetric else Range(h.low, h.high)


def percentile(h: MagnitudeHistogram, symmetric: bool, percent: float) -> Range:
    """Choose the activation range that leaves out the outermost values on each side: `percent`
    percent of them lie inside; each end is the outer edge of a bin."""
    if symmetric:
        return Range.symmetric(min(_magnitude(h.magnitudes, percent / 100, h.width), h.absmax))
    signed = torch.cat([h.counts[0].flip(0), h.counts[1]])
    share = 1 - (100 - percent) / 200
    high = _magnitude(signed, share, h.width) - BINS * h.width
    low = _magnitude(signed.flip(0), share, h.width) - BINS * h.width
    return Range(max(h.low, min(-low, 0.0)), min(h.high, max(high, 0.0)))


def _magnitude(counts: Tensor, share: float, width: float) -> float:
    """Return the activation magnitude below which the share `share` of the counted values lies: the
    upper edge of the bin that holds this quantile, the first bin starting at 0."""
    cumulative = counts.cumsum(0)
    rank = math.ceil(share * (int(cumulative[-1]) - 1)) + 1
    return (int(torch.searchsorted(cumulative, torch.tensor(rank))) + 1) * width


def mse(h: MagnitudeHistogram, symmetric: bool, candidates: int = 64) -> Range:
    """Choose the clipped activation range with the least mean squared error of its 256 integers.

    Values are taken as uniform inside a bin, so the error is an integral with a closed form,
    correct also where the step is finer than the bin. Clips are tried in steps of 1/16 octave
    (4.4 %; the error is flat near its minimum) over 4 octaves.
    """
    if h.absmax == 0:
        return Range(0.0, 0.0)
    error = _squared_error_of(h)
    shrinks = [2 ** (-i / 16) for i in range(candidates)]
    if symmetric:
        limits = [h.absmax * k for k in shrinks]
        return Range.symmetric(min(limits, key=lambda t: error(-t * 128 / 127, t)))
    low, high = h.low, h.high
    for _ in range(2):
        high = min((h.high * k for k in shrinks), key=lambda t: error(low, t))
        low = min((h.low * k for k in shrinks), key=lambda t: error(t, high))
    return Range(low, high)


def _squared_error_of(h: MagnitudeHistogram) -> Callable[[float, float], float]:
    """The function (low, high) -> sum of squared errors of the 256 integers from low to high."""
    width, signed = 4 * h.width, h.counts.reshape(2, -1, 4).sum(2)
    used = min(int(h.absmax / width) + 1, signed.shape[1])
    counts = torch.cat([signed[0, :used].flip(0), signed[1, :used]]).double()
    edges = torch.arange(-used, used + 1, dtype=torch.float64) * width
    return lambda low, high: float(counts @ _squared_error(edges, low, high).diff())


def _squared_error(x: Tensor, low: float, high: float) -> Tensor:
    """Integrate the error of an activation range: from 0 to x (u - q(u)) ** 2, where q rounds to
    one of 256 multiples of (high - low) / 255 that start near `low`."""
    step = (high - low) / 255
    if step <= 0:
        return x**3 / 3
    first = round(low / step)
    u = x / step
    q = u.round().clamp(first, first + 255)
    return step**3 * (q / 12 + (u - q) ** 3 / 3)


def entropy(h: MagnitudeHistogram, symmetric: bool) -> Range:
    """Choose the clipped activation range whose 128-level quantization loses the least information
    on the values.

    As published: for each clip, the reference is the histogram up to it with all values beyond
    added to its last bin; the candidate spreads each of 128 levels evenly over the bins that are
    not empty; the clip with the least KL(reference, candidate) is chosen, the widest among equals.
    An empty bin of the candidate counts 1e-4 (as in Apache MXNet's calibrator), so that one outlier
    beyond empty bins does not forbid every clip.
    """
    if h.absmax == 0:
        return Range(0.0, 0.0)
    counts, width, used = _magnitudes(h)
    tops = range(used, LEVELS - 1, -max(1, used // ENTROPY_CLIPS))
    best = min(tops, key=lambda top: (_divergence(counts, top), -top), default=used)
    return clip_range(h, symmetric, h.absmax if best == used else best * width)


def clip_range(h: MagnitudeHistogram, symmetric: bool, limit: float) -> Range:
    """Return the activation range of the values of magnitude up to `limit`, or
    Range.symmetric(limit)."""
    return Range.symmetric(limit) if symmetric else Range(max(h.low, -limit), min(h.high, limit))


def _magnitudes(h: MagnitudeHistogram) -> tuple[Tensor, float, int]:
    """Return of an activation histogram (counts of |x| in ENTROPY_BINS wider bins, their width,
    number of bins in use)."""
    counts = h.magnitudes.reshape(ENTROPY_BINS, -1).sum(1).double()
    width = h.width * (BINS // ENTROPY_BINS)
    return counts, width, min(int(h.absmax / width) + 1, ENTROPY_BINS)


def _divergence(counts: Tensor, top: int) -> float:
    """Compute KL(reference, candidate) of clipping an activation range at `top` bins; both are
    normalised."""
    inside = counts[:top]
    reference = inside.clone()
    reference[-1] += counts[top:].sum()
    level = torch.arange(top) * LEVELS // top
    filled = (inside > 0).double()
    mass = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, level, inside)
    share = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, level, filled)
    candidate = ((mass / share.clamp(min=1))[level] * filled).clamp(min=EMPTY)
    p, q = reference / reference.sum(), candidate / candidate.sum()
    seen = p > 0
    return float((p[seen] * (p[seen] / q[seen]).log()).sum())


def get_chooser(
    method: str, percent: float, symmetric: bool
) -> Callable[[MagnitudeHistogram], Range]:
    """Return the function that chooses a Range from a MagnitudeHistogram.

    method: name as in the recipe (activations.range)
    percent: share of the values inside the range, in percent, for method percentile
    """
    if method == "percentile":
        return lambda h: percentile(h, symmetric, percent)
    choose = {"minmax": minmax, "entropy": entropy, "mse": mse}[method]
    return lambda h: choose(h, symmetric)


def is_searched(method: str) -> bool:
    """Return True for a method of choosing activation ranges that minimises a loss, so that two
    distant ranges may be equally good."""
    return method in ("mse", "entropy")


def compute_excess_loss(method: str, h: MagnitudeHistogram, other: Range, best: Range) -> float:
    """Root of the excess of a searched method's loss at `other` over the loss at `best`, or 0.

    The loss is the relative squared error, or the divergence in nats. Near its minimum it grows as
    the square of the distance, hence the root.
    """
    if method == "mse":
        loss, nothing = _squared_error_of(h), 2.0**-48 * _square(h)
        least = loss(best.low, best.high)
        return math.sqrt(max(loss(other.low, other.high) - least, 0) / max(least, nothing, 1e-300))
    counts, width, _ = _magnitudes(h)

    def divergence(chosen: Range) -> float:
        top = max(round(max(-chosen.low, chosen.high) / width), LEVELS)
        return _divergence(torch.nn.functional.pad(counts, (0, max(0, top - len(counts)))), top)

    return math.sqrt(max(divergence(other) - divergence(best), 0))


def _square(h: MagnitudeHistogram) -> float:
    """Sum the squares of an activation histogram, each value taken as the middle of its bin."""
    return float((h.magnitudes * ((torch.arange(BINS) + 0.5) * h.width) ** 2).sum())


def list_neighbours(method: str, h: MagnitudeHistogram, chosen: Range) -> list[Range]:
    """List the 9 activation ranges around and including `chosen`: each end one search step in,
    kept, or out."""
    _, width, used = _magnitudes(h)
    stride = max(1, used // ENTROPY_CLIPS) * width
    by = 2 ** (1 / 16) if method == "mse" else 1 + stride / max(chosen.high, -chosen.low, 1e-30)
    steps = (1 / by, 1.0, by)
    return [Range(chosen.low * a, chosen.high * b) for a in steps for b in steps]
