"""What compress is predicted to need, from the checkpoint's headers alone.

memory = the libraries + the larger of (what lies outside the blocks, read once to make the first
         hidden states) and (one block, as float, de-quantized and codes) + two streams
disk   = codes and scales + folded floats + one stream, twice while it is put together
time   = multiply-adds of all passes at a measured rate, texts filling half the sequence length
"""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod

from optimizer.recipe import Compression
from optimizer.store import Estimate, Shapes

LIBRARIES = 520 << 20  # resident after importing torch, transformers and datasets (measured)
RATE = 1.5e10  # multiply-adds per second of one core, everything included (measured)
BLOCK = re.compile(r"\.(\d+)\.")


def estimate(section: Compression, shapes: Shapes) -> Estimate:
    """shapes: of every tensor of the checkpoint."""
    blocks: dict[str, int] = defaultdict(int)
    outside = linear = width = 0
    for name, shape in shapes.items():
        found = BLOCK.search(name)
        if found is None:
            outside += prod(shape)
            continue
        blocks[name[: found.end()]] += prod(shape)
        if len(shape) == 2:
            linear += prod(shape)
            width = max(width, min(shape))
    quantize, calibrate = section.quantize, section.calibrate
    tokens = calibrate.samples * calibrate.sequence_length if calibrate else 0
    stream = 4 * tokens * width
    one_block = max(blocks.values(), default=0)
    bits = quantize.weights.bits
    codes = linear * bits // 8 + 4 * linear // (quantize.weights.group_size or 256)
    folded = 4 * linear // 4 if "smoothquant" in quantize.transforms else 0
    passes = (4 if calibrate else 0) + 2 * quantize.bias_correction
    passes += "smoothquant" in quantize.transforms
    return Estimate(
        memory=LIBRARIES + max(4 * outside, 10 * one_block) + 2 * stream,
        disk=2 * (codes + folded) + stream,
        seconds=2 + (passes * tokens / 2 + 40) * linear / RATE,
    )
