"""A GPU that is not there: arrays that are never touched, seconds that are worked out.

`phantom` are the arrays, `kernels` what works on them takes, `stand_in_cupy` and `stand_in_cudnn`
what Chainer meets in place of CuPy and cuDNN, `standing_in` puts them in Chainer's way for a time.
`machine` is the device that the runtime is given, `rehearse` runs a training on it, `arena_map`
shows what lay where when a request failed.
"""
