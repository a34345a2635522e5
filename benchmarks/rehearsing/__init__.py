"""A GPU that is not there: arrays that are never touched, seconds that are worked out.

`phantom` and `array_functions` are the arrays, `roofline` what kernels take, `stand_in_cupy` and
`stand_in_cudnn` what Chainer meets in place of CuPy and cuDNN; `standing_in` puts them in its way
for a time, over the `gpu` in force. `machine` is the device that the runtime is given, `rehearse`
runs a training on it (one of `networks`, say), `arena_map` shows what lay where when a request
failed.
"""
