"""Build the seed's networks: AlexNet, the ResNet family, and the examples of figures 4 and 6.

Covers output shapes only; a layer's weights play no part here.

Source: Wang et al., PPoPP 2018: AlexNet without groups; ResNet of any depth,
3 (n1 + n2 + n3 + n4) + 2 layers; inputs 3 x 227 x 227; convolution and pooling round down. The
networks of figures 4 and 6 have made-up shapes, since the figures give none.
"""

from collections.abc import Sequence

from dynamemo.graph.network import Layer, LayerKind, Network

#: Blocks of each stage of the common ResNets.
RESNET_50 = (3, 4, 6, 3)
RESNET_101 = (3, 4, 23, 3)
RESNET_152 = (3, 8, 36, 3)


class NetworkBuilder:
    """Add layers one after another; each method returns the new layer's index.

    Parameters
    ----------
    name
        The network's name.

    Notes
    -----
    A method with a `source` reads the layer added last where none is given.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._layers: list[Layer] = []

    def build(self) -> Network:
        """Return the network, checked; raises TraceError if it is not well formed."""
        network = Network(self._name, tuple(self._layers))
        network.validate()
        return network

    def data(self, name: str, shape: tuple[int, ...]) -> int:
        """Add a source of data of a shape, batch first."""
        return self._add(name, LayerKind.DATA, (), shape)

    def conv(
        self,
        name: str,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        pad: int = 0,
        source: int | None = None,
    ) -> int:
        """Add a convolution with a square kernel."""
        index = self._source(source)
        batch, _, height, width = self._layers[index].shape
        out_hw = [_reduced(size, kernel, stride, pad) for size in (height, width)]
        return self._add(name, LayerKind.CONV, (index,), (batch, channels, *out_hw))

    def pool(self, name: str, kernel: int, *, stride: int, source: int | None = None) -> int:
        """Add a pooling with a square window and no padding."""
        index = self._source(source)
        batch, channels, height, width = self._layers[index].shape
        out_hw = [_reduced(size, kernel, stride, 0) for size in (height, width)]
        return self._add(name, LayerKind.POOL, (index,), (batch, channels, *out_hw))

    def fc(self, name: str, units: int, *, sources: tuple[int, ...] = ()) -> int:
        """Add a fully connected layer."""
        indices = sources or (self._source(None),)
        return self._add(name, LayerKind.FC, indices, (self._layers[indices[0]].shape[0], units))

    def same(self, name: str, kind: LayerKind, *, source: int | None = None) -> int:
        """Add a layer whose output has its input's shape."""
        index = self._source(source)
        return self._add(name, kind, (index,), self._layers[index].shape)

    def sum(self, name: str, sources: tuple[int, ...]) -> int:
        """Add a join that adds tensors of one shape."""
        return self._add(name, LayerKind.SUM, sources, self._layers[sources[0]].shape)

    def concat(self, name: str, sources: tuple[int, ...]) -> int:
        """Add a join that places tensors side by side along their channels."""
        shapes = [self._layers[source].shape for source in sources]
        channels = sum(shape[1] for shape in shapes)
        joined = (shapes[0][0], channels, *shapes[0][2:])
        return self._add(name, LayerKind.CONCAT, sources, joined)

    def _source(self, source: int | None) -> int:
        """Return the layer meant: the given one or the last."""
        return len(self._layers) - 1 if source is None else source

    def _add(
        self, name: str, kind: LayerKind, predecessors: tuple[int, ...], shape: tuple[int, ...]
    ) -> int:
        """Add a layer and return its index."""
        if min(shape) <= 0:
            raise ValueError(f"layer {name!r} would have the shape {shape}; the input is too small")
        self._layers.append(Layer(name, kind, predecessors, shape))
        return len(self._layers) - 1


def alexnet(batch: int) -> Network:
    """Build AlexNet: a data layer and the seed's 23 layers, so that step 1 is CONV1's forward.

    Parameters
    ----------
    batch
        Images per iteration; the published curve has 200.
    """
    builder = NetworkBuilder("AlexNet")
    builder.data("DATA", (batch, 3, 227, 227))
    builder.conv("CONV1", 96, 11, stride=4)
    builder.same("RELU1", LayerKind.ACT)
    builder.same("LRN1", LayerKind.LRN)
    builder.pool("POOL1", 3, stride=2)
    builder.conv("CONV2", 256, 5, pad=2)
    builder.same("RELU2", LayerKind.ACT)
    builder.same("LRN2", LayerKind.LRN)
    builder.pool("POOL2", 3, stride=2)
    for index, channels in ((3, 384), (4, 384), (5, 256)):
        builder.conv(f"CONV{index}", channels, 3, pad=1)
        builder.same(f"RELU{index}", LayerKind.ACT)
    builder.pool("POOL5", 3, stride=2)
    for index in (1, 2):
        builder.fc(f"FC{index}", 4096)
        builder.same(f"RELU{index + 5}", LayerKind.ACT)
        builder.same(f"DROP{index}", LayerKind.DROPOUT)
    builder.fc("FC3", 1000)
    builder.same("SOFTMAX", LayerKind.SOFTMAX)
    return builder.build()


def resnet(blocks: Sequence[int], batch: int) -> Network:
    """Build a ResNet with bottleneck blocks.

    Parameters
    ----------
    blocks
        Blocks of the four stages, such as `RESNET_50`.
    batch
        Images per iteration.
    """
    builder = NetworkBuilder(f"ResNet-{3 * sum(blocks) + 2}")
    builder.data("DATA", (batch, 3, 227, 227))
    builder.conv("CONV1", 64, 7, stride=2, pad=3)
    builder.same("BN1", LayerKind.BN)
    builder.same("RELU1", LayerKind.ACT)
    last = builder.pool("POOL1", 3, stride=2)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if block == 0 and stage > 0 else 1
            last = _add_bottleneck(
                builder, last, f"{stage + 2}.{block + 1}", 64 << stage, stride, block == 0
            )
    builder.pool("POOL5", 7, stride=1, source=last)
    builder.fc("FC", 1000)
    builder.same("SOFTMAX", LayerKind.SOFTMAX)
    return builder.build()


def figure_4() -> Network:
    """Build the example of figure 4: two convolutions read the data and meet in one layer."""
    builder = NetworkBuilder("figure 4")
    data = builder.data("DATA", (1, 3, 8, 8))
    builder.conv("CONV1", 4, 3, pad=1)
    pool = builder.pool("POOL", 2, stride=2)
    conv = builder.conv("CONV2", 4, 2, stride=2, source=data)
    builder.fc("FC", 10, sources=(pool, conv))
    builder.same("SOFTMAX", LayerKind.SOFTMAX)
    return builder.build()


def figure_6() -> Network:
    """Build the nonlinear example of figure 6, layers a to j, listed by name."""
    builder = NetworkBuilder("figure 6")
    builder.data("a", (1, 4, 8, 8))
    fork = builder.same("b", LayerKind.FORK)
    first = builder.conv("c", 4, 1)
    second = builder.conv("d", 4, 1, source=fork)
    joined = builder.same("e", LayerKind.ACT, source=first)
    inner = builder.same("f", LayerKind.FORK, source=second)
    left = builder.conv("g", 4, 1, source=inner)
    right = builder.conv("h", 4, 1, source=inner)
    builder.concat("i", (joined, left, right))
    builder.same("j", LayerKind.SOFTMAX)
    return builder.build()


def _add_bottleneck(
    builder: NetworkBuilder, source: int, name: str, width: int, stride: int, is_first: bool
) -> int:
    """Add one block behind a fork; the first of a stage has a convolution on its shortcut."""
    fork = builder.same(f"FORK{name}", LayerKind.FORK, source=source)
    builder.conv(f"CONV{name}a", width, 1, stride=stride)
    builder.same(f"BN{name}a", LayerKind.BN)
    builder.same(f"RELU{name}a", LayerKind.ACT)
    builder.conv(f"CONV{name}b", width, 3, pad=1)
    builder.same(f"BN{name}b", LayerKind.BN)
    builder.same(f"RELU{name}b", LayerKind.ACT)
    builder.conv(f"CONV{name}c", 4 * width, 1)
    main = builder.same(f"BN{name}c", LayerKind.BN)
    shortcut = fork
    if is_first:
        builder.conv(f"CONV{name}s", 4 * width, 1, stride=stride, source=fork)
        shortcut = builder.same(f"BN{name}s", LayerKind.BN)
    builder.sum(f"SUM{name}", (main, shortcut))
    return builder.same(f"RELU{name}", LayerKind.ACT)


def _reduced(size: int, kernel: int, stride: int, pad: int) -> int:
    """Return the length that a sliding window leaves of `size`, rounded down."""
    return (size + 2 * pad - kernel) // stride + 1
