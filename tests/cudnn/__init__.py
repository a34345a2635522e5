"""cuDNN without a GPU: the choice of plans, the surface Chainer sees, the calls made."""
