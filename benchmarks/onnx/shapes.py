"""A YOLO-shaped detector, and images of drawn shapes to train and to judge it.

The graph has one output (rows, 4 + CLASSES, anchors): boxes of 0 to SIZE pixels above scores of
0 to 1, decoded and joined in the graph, as YOLO's exporters write it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

SIZE, CLASSES, MOST = 128, 3, 4
"""Pixels of a side; disc, square and cross; maximum shapes in an image."""
STRIDES = (8, 16, 32)
Array = NDArray[Any]


def draw(count: int, seed: int) -> tuple[Array, list[Array]]:
    """(images (count, 3, SIZE, SIZE) of 0 to 1, [rows of x, y, w, h, class per image])."""
    rng = np.random.default_rng(seed)
    images = np.empty((count, 3, SIZE, SIZE), np.float32)
    labels = []
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for i in range(count):
        image = rng.random((3, 1, 1)) * 0.5 + rng.normal(0, 0.08, (3, SIZE, SIZE))
        each: list[list[float]] = []
        for _ in range(rng.integers(1, MOST + 1)):
            side = float(np.exp(rng.uniform(np.log(10), np.log(72))))
            x, y = rng.uniform(side / 2, SIZE - side / 2, 2)
            if any(abs(x - o[0]) + abs(y - o[1]) < (side + o[2]) / 2 for o in each):
                continue
            kind = int(rng.integers(CLASSES))
            across, down = np.abs(columns - x), np.abs(rows - y)
            square = (across < side / 2) & (down < side / 2)
            inside = (
                across**2 + down**2 < (side / 2) ** 2,
                square,
                square & ((across < side / 6) | (down < side / 6)),
            )[kind]
            image[:, inside] = (rng.random((3, 1)) * 0.6 + 0.4) * rng.uniform(0.8, 1)
            each.append([x, y, side, side, kind])
        images[i] = image.clip(0, 1)
        labels.append(np.array(each))
    return images, labels


class Unit(nn.Sequential):
    """Convolution, norm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.SiLU())


class Stage(nn.Module):
    """Halve the image; add what two convolutions see; join both."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = Unit(inputs, outputs, 3, 2)
        self.first, self.second = Unit(outputs, outputs // 2), Unit(outputs // 2, outputs)
        self.join = Unit(2 * outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.join(torch.cat([x, x + self.second(self.first(x))], 1))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """Backbone, a path from coarse to fine, and a head for each of STRIDES."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 48, 64)
        self.stem = Unit(3, 12, 3, 2)
        sizes = zip((12, *widths), widths, strict=False)
        self.stages = nn.ModuleList(Stage(i, o) for i, o in sizes)
        self.narrow = nn.ModuleList(Unit(w, 32, 1) for w in widths[1:])
        self.boxes = nn.ModuleList(
            nn.Sequential(Unit(32, 32), nn.Conv2d(32, 4, 1)) for _ in STRIDES
        )
        self.scores = nn.ModuleList(
            nn.Sequential(Unit(32, 32), nn.Conv2d(32, CLASSES, 1)) for _ in STRIDES
        )
        for head in self.scores:
            nn.init.constant_(head[1].bias, -4.0)
        centres = []
        for stride in STRIDES:
            at = (torch.arange(SIZE // stride) + 0.5) * stride
            centres.append(torch.stack(torch.meshgrid(at, at, indexing="xy")).flatten(1))
        steps = [
            torch.full((1, c.shape[1]), float(s)) for c, s in zip(centres, STRIDES, strict=True)
        ]
        self.register_buffer("centres", torch.cat(centres, 1), persistent=False)
        self.register_buffer("steps", torch.cat(steps, 1), persistent=False)

    def raw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(boxes (rows, 4, anchors) in steps, scores (rows, CLASSES, anchors) as logits)."""
        x, maps = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        features = [narrow(m) for narrow, m in zip(self.narrow, maps[1:], strict=True)]
        for i in (1, 0):
            features[i] = features[i] + functional.interpolate(features[i + 1], scale_factor=2.0)
        boxes = [b(f).flatten(2) for b, f in zip(self.boxes, features, strict=True)]
        scores = [s(f).flatten(2) for s, f in zip(self.scores, features, strict=True)]
        return torch.cat(boxes, 2), torch.cat(scores, 2)

    def decode(self, boxes: Tensor) -> Tensor:
        """Centre and size in pixels."""
        steps: Any = self.steps
        return torch.cat(
            [boxes[:, :2] * steps + self.centres, boxes[:, 2:].clamp(-4, 4).exp() * steps], 1
        )

    def forward(self, images: Tensor) -> Tensor:
        boxes, scores = self.raw(images)
        return torch.cat([self.decode(boxes), scores.sigmoid()], 1)


def targets(labels: list[Array], detector: Detector) -> tuple[Tensor, Tensor, Tensor]:
    """(boxes, classes, mask of anchors in the middle half of a shape of their stride)."""
    anchors = detector.centres.shape[1]  # type: ignore[union-attr]
    centres, steps = detector.centres.numpy(), detector.steps.numpy()[0]  # type: ignore[union-attr, operator]
    boxes = np.ones((len(labels), 4, anchors), np.float32)
    classes = np.zeros((len(labels), CLASSES, anchors), np.float32)
    for i, rows in enumerate(labels):
        for x, y, w, h, kind in rows:
            stride = STRIDES[0] if w < 24 else STRIDES[1] if w < 48 else STRIDES[2]
            near = np.maximum(abs(centres[0] - x) / w, abs(centres[1] - y) / h)
            mine = (steps == stride) & ((near < 0.25) | (near == near[steps == stride].min()))
            boxes[i][:, mine] = np.array([[x], [y], [w], [h]])
            classes[i][int(kind), mine] = 1
    mask = torch.from_numpy(classes.max(1))
    return torch.from_numpy(boxes), torch.from_numpy(classes), mask


def train(steps: int, seed: int = 0) -> Detector:
    """A detector after `steps` batches of 16 drawn images."""
    torch.manual_seed(seed)
    detector = Detector()
    optimizer = torch.optim.AdamW(detector.parameters(), 2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for step in range(steps):
        images, labels = draw(16, 1000 + step)
        boxes, classes, mask = targets(labels, detector)
        found, logits = detector.raw(torch.from_numpy(images))
        pixels = detector.decode(found)
        weight = mask[:, None] / boxes[:, 2:3]
        apart = (functional.l1_loss(pixels, boxes, reduction="none") * weight).sum() / mask.sum()
        chance = logits.sigmoid()
        focal = (chance - classes).abs() ** 2
        losses = functional.binary_cross_entropy_with_logits(logits, classes, reduction="none")
        loss = 2 * apart + (losses * focal).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.3f}, boxes {float(apart):.3f}", flush=True)
    return detector.eval()
