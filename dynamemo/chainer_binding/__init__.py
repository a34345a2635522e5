"""The one package that knows Chainer: what it applies, keeps and changes, told to the manager."""

from dynamemo.chainer_binding.binding import ChainerBinding
from dynamemo.chainer_binding.replay import has_cuda

__all__ = ["ChainerBinding", "has_cuda"]
