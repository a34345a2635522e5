"""Seconds of kernels on an H200, by a roofline: whichever takes longer, its bytes or its products.

One table of constants. They are set so that ResNet-50 at batch 256 takes the 98.6 ms a step that
were measured on the card (`benchmarks.training_speed`, cuDNN 9, TF32, no budget).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a card can do."""

    #: Bytes a second. HBM3e has 4.8e12 on paper; a copy reaches 4.0e12 with both ways counted, and
    #: what trainings do on average (BatchNormalization, ReLU, sums) this much.
    bytes_per_s: float = 2.9e12
    #: Floating point operations a second, TF32, of convolutions of more than one pixel. 495e12 on
    #: paper.
    convolution_flops_per_s: float = 250e12
    #: The same of 1×1 convolutions.
    pointwise_flops_per_s: float = 200e12
    #: The same of matrix products.
    product_flops_per_s: float = 300e12
    #: Seconds of a kernel that has nothing to do.
    least_s: float = 8e-6

    def seconds(self, nbytes: int, flops: float = 0.0, flops_per_s: float = 1.0) -> float:
        """Return the seconds of a kernel that moves so many bytes."""
        return max(nbytes / self.bytes_per_s, flops / flops_per_s) + self.least_s
