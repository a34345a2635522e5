"""The C functions of cuDNN 9 that are called, declared for cffi.

Every handle, descriptor and device pointer is declared as ``uintptr_t``: it is passed the same way,
and Python integers then go in and come out without a cast. Enumerations are ``int``.
Source: the interface of cudnn_ops.h, cudnn_cnn.h, cudnn_adv.h and cudnn_graph.h, 9.19.
"""

from __future__ import annotations

__all__ = ["DECLARATIONS"]

_GENERAL = """
size_t cudnnGetVersion(void);
size_t cudnnGetCudartVersion(void);
const char *cudnnGetErrorString(int status);
void cudnnGetLastErrorString(char *message, size_t max_size);
int cudnnCreate(uintptr_t *handle);
int cudnnDestroy(uintptr_t handle);
int cudnnSetStream(uintptr_t handle, uintptr_t stream);

int cudnnCreateTensorDescriptor(uintptr_t *descriptor);
int cudnnDestroyTensorDescriptor(uintptr_t descriptor);
int cudnnSetTensor4dDescriptor(uintptr_t descriptor, int format, int type,
                               int n, int c, int h, int w);
int cudnnSetTensorNdDescriptor(uintptr_t descriptor, int type, int ndim,
                               const int *shape, const int *strides);
int cudnnGetTensorNdDescriptor(uintptr_t descriptor, int requested, int *type, int *ndim,
                               int *shape, int *strides);
int cudnnCreateFilterDescriptor(uintptr_t *descriptor);
int cudnnDestroyFilterDescriptor(uintptr_t descriptor);
int cudnnSetFilterNdDescriptor(uintptr_t descriptor, int type, int format, int ndim,
                               const int *shape);
"""

_CONVOLUTION = """
typedef struct {
    int algorithm;
    int status;
    float time_ms;
    size_t memory;
    int determinism;
    int math_type;
    int reserved[3];
} algorithm_t;

int cudnnCreateConvolutionDescriptor(uintptr_t *descriptor);
int cudnnDestroyConvolutionDescriptor(uintptr_t descriptor);
int cudnnSetConvolutionNdDescriptor(uintptr_t descriptor, int ndim, const int *pad,
                                    const int *stride, const int *dilation, int mode, int type);
int cudnnSetConvolutionMathType(uintptr_t descriptor, int math_type);
int cudnnSetConvolutionGroupCount(uintptr_t descriptor, int groups);
int cudnnGetConvolutionForwardAlgorithm_v7(
    uintptr_t handle, uintptr_t x_descriptor, uintptr_t w_descriptor, uintptr_t convolution,
    uintptr_t y_descriptor, int requested, int *returned, algorithm_t *results);
int cudnnGetConvolutionBackwardDataAlgorithm_v7(
    uintptr_t handle, uintptr_t w_descriptor, uintptr_t y_descriptor, uintptr_t convolution,
    uintptr_t x_descriptor, int requested, int *returned, algorithm_t *results);
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    uintptr_t handle, uintptr_t x_descriptor, uintptr_t y_descriptor, uintptr_t convolution,
    uintptr_t w_descriptor, int requested, int *returned, algorithm_t *results);
int cudnnConvolutionForward(
    uintptr_t handle, uintptr_t alpha, uintptr_t x_descriptor, uintptr_t x,
    uintptr_t w_descriptor, uintptr_t w, uintptr_t convolution, int algorithm,
    uintptr_t workspace, size_t workspace_bytes, uintptr_t beta,
    uintptr_t y_descriptor, uintptr_t y);
int cudnnConvolutionBackwardData(
    uintptr_t handle, uintptr_t alpha, uintptr_t w_descriptor, uintptr_t w,
    uintptr_t y_descriptor, uintptr_t gy, uintptr_t convolution, int algorithm,
    uintptr_t workspace, size_t workspace_bytes, uintptr_t beta,
    uintptr_t x_descriptor, uintptr_t gx);
int cudnnConvolutionBackwardFilter(
    uintptr_t handle, uintptr_t alpha, uintptr_t x_descriptor, uintptr_t x,
    uintptr_t y_descriptor, uintptr_t gy, uintptr_t convolution, int algorithm,
    uintptr_t workspace, size_t workspace_bytes, uintptr_t beta,
    uintptr_t w_descriptor, uintptr_t gw);
"""

_GRAPH = """
typedef struct { int64_t numerator; int64_t denominator; } fraction_t;

int cudnnBackendCreateDescriptor(int kind, uintptr_t *descriptor);
int cudnnBackendDestroyDescriptor(uintptr_t descriptor);
int cudnnBackendFinalize(uintptr_t descriptor);
int cudnnBackendSetAttribute(uintptr_t descriptor, int name, int type, int64_t count,
                             const void *values);
int cudnnBackendGetAttribute(uintptr_t descriptor, int name, int type, int64_t requested,
                             int64_t *count, void *values);
int cudnnBackendExecute(uintptr_t handle, uintptr_t plan, uintptr_t pack);
"""

_LAYERS = """
int cudnnCreatePoolingDescriptor(uintptr_t *descriptor);
int cudnnDestroyPoolingDescriptor(uintptr_t descriptor);
int cudnnSetPoolingNdDescriptor(uintptr_t descriptor, int mode, int nan_option, int ndim,
                                const int *window, const int *pad, const int *stride);
int cudnnPoolingForward(uintptr_t handle, uintptr_t pooling, uintptr_t alpha,
                        uintptr_t x_descriptor, uintptr_t x, uintptr_t beta,
                        uintptr_t y_descriptor, uintptr_t y);
int cudnnPoolingBackward(uintptr_t handle, uintptr_t pooling, uintptr_t alpha,
                         uintptr_t y_descriptor, uintptr_t y, uintptr_t gy_descriptor,
                         uintptr_t gy, uintptr_t x_descriptor, uintptr_t x, uintptr_t beta,
                         uintptr_t gx_descriptor, uintptr_t gx);
int cudnnSoftmaxForward(uintptr_t handle, int algorithm, int mode, uintptr_t alpha,
                        uintptr_t x_descriptor, uintptr_t x, uintptr_t beta,
                        uintptr_t y_descriptor, uintptr_t y);
int cudnnSoftmaxBackward(uintptr_t handle, int algorithm, int mode, uintptr_t alpha,
                         uintptr_t y_descriptor, uintptr_t y, uintptr_t gy_descriptor,
                         uintptr_t gy, uintptr_t beta, uintptr_t gx_descriptor, uintptr_t gx);
int cudnnCreateActivationDescriptor(uintptr_t *descriptor);
int cudnnDestroyActivationDescriptor(uintptr_t descriptor);
int cudnnSetActivationDescriptor(uintptr_t descriptor, int mode, int nan_option, double coef);
int cudnnActivationForward(uintptr_t handle, uintptr_t activation, uintptr_t alpha,
                           uintptr_t x_descriptor, uintptr_t x, uintptr_t beta,
                           uintptr_t y_descriptor, uintptr_t y);
int cudnnActivationBackward(uintptr_t handle, uintptr_t activation, uintptr_t alpha,
                            uintptr_t y_descriptor, uintptr_t y, uintptr_t gy_descriptor,
                            uintptr_t gy, uintptr_t x_descriptor, uintptr_t x, uintptr_t beta,
                            uintptr_t gx_descriptor, uintptr_t gx);
int cudnnCreateSpatialTransformerDescriptor(uintptr_t *descriptor);
int cudnnDestroySpatialTransformerDescriptor(uintptr_t descriptor);
int cudnnSetSpatialTransformerNdDescriptor(uintptr_t descriptor, int sampler, int type, int ndim,
                                           uintptr_t shape);
int cudnnSpatialTfGridGeneratorForward(uintptr_t handle, uintptr_t transformer, uintptr_t theta,
                                       uintptr_t grid);
int cudnnSpatialTfGridGeneratorBackward(uintptr_t handle, uintptr_t transformer, uintptr_t ggrid,
                                        uintptr_t gtheta);
int cudnnSpatialTfSamplerForward(uintptr_t handle, uintptr_t transformer, uintptr_t alpha,
                                 uintptr_t x_descriptor, uintptr_t x, uintptr_t grid,
                                 uintptr_t beta, uintptr_t y_descriptor, uintptr_t y);
int cudnnSpatialTfSamplerBackward(uintptr_t handle, uintptr_t transformer, uintptr_t alpha,
                                  uintptr_t x_descriptor, uintptr_t x, uintptr_t beta,
                                  uintptr_t gx_descriptor, uintptr_t gx, uintptr_t grid_alpha,
                                  uintptr_t gy_descriptor, uintptr_t gy, uintptr_t grid,
                                  uintptr_t grid_beta, uintptr_t ggrid);
"""

_NORMALIZATION = """
int cudnnDeriveBNTensorDescriptor(uintptr_t derived, uintptr_t x_descriptor, int mode);
int cudnnBatchNormalizationForwardInference(
    uintptr_t handle, int mode, uintptr_t alpha, uintptr_t beta,
    uintptr_t x_descriptor, uintptr_t x, uintptr_t y_descriptor, uintptr_t y,
    uintptr_t statistics, uintptr_t gamma, uintptr_t bias, uintptr_t mean, uintptr_t variance,
    double epsilon);
int cudnnBatchNormalizationForwardTraining(
    uintptr_t handle, int mode, uintptr_t alpha, uintptr_t beta,
    uintptr_t x_descriptor, uintptr_t x, uintptr_t y_descriptor, uintptr_t y,
    uintptr_t statistics, uintptr_t gamma, uintptr_t bias, double factor,
    uintptr_t running_mean, uintptr_t running_variance, double epsilon,
    uintptr_t saved_mean, uintptr_t saved_inverse);
int cudnnBatchNormalizationBackward(
    uintptr_t handle, int mode, uintptr_t alpha_data, uintptr_t beta_data,
    uintptr_t alpha_parameters, uintptr_t beta_parameters,
    uintptr_t x_descriptor, uintptr_t x, uintptr_t gy_descriptor, uintptr_t gy,
    uintptr_t gx_descriptor, uintptr_t gx, uintptr_t statistics, uintptr_t gamma,
    uintptr_t ggamma, uintptr_t gbeta, double epsilon,
    uintptr_t saved_mean, uintptr_t saved_inverse);
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    uintptr_t handle, int mode, int operations, uintptr_t x_descriptor, uintptr_t z_descriptor,
    uintptr_t y_descriptor, uintptr_t statistics, uintptr_t activation, size_t *nbytes);
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    uintptr_t handle, int mode, int operations, uintptr_t x_descriptor, uintptr_t y_descriptor,
    uintptr_t gy_descriptor, uintptr_t gz_descriptor, uintptr_t gx_descriptor,
    uintptr_t statistics, uintptr_t activation, size_t *nbytes);
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    uintptr_t handle, int mode, int operations, uintptr_t activation, uintptr_t x_descriptor,
    size_t *nbytes);
int cudnnBatchNormalizationForwardTrainingEx(
    uintptr_t handle, int mode, int operations, uintptr_t alpha, uintptr_t beta,
    uintptr_t x_descriptor, uintptr_t x, uintptr_t z_descriptor, uintptr_t z,
    uintptr_t y_descriptor, uintptr_t y, uintptr_t statistics, uintptr_t gamma, uintptr_t bias,
    double factor, uintptr_t running_mean, uintptr_t running_variance, double epsilon,
    uintptr_t saved_mean, uintptr_t saved_inverse, uintptr_t activation,
    uintptr_t workspace, size_t workspace_bytes, uintptr_t reserve, size_t reserve_bytes);
int cudnnBatchNormalizationBackwardEx(
    uintptr_t handle, int mode, int operations, uintptr_t alpha_data, uintptr_t beta_data,
    uintptr_t alpha_parameters, uintptr_t beta_parameters,
    uintptr_t x_descriptor, uintptr_t x, uintptr_t y_descriptor, uintptr_t y,
    uintptr_t gy_descriptor, uintptr_t gy, uintptr_t gz_descriptor, uintptr_t gz,
    uintptr_t gx_descriptor, uintptr_t gx, uintptr_t statistics, uintptr_t gamma,
    uintptr_t bias, uintptr_t ggamma, uintptr_t gbeta, double epsilon,
    uintptr_t saved_mean, uintptr_t saved_inverse, uintptr_t activation,
    uintptr_t workspace, size_t workspace_bytes, uintptr_t reserve, size_t reserve_bytes);
"""

_RECURRENT = """
int cudnnCreateDropoutDescriptor(uintptr_t *descriptor);
int cudnnDestroyDropoutDescriptor(uintptr_t descriptor);
int cudnnDropoutGetStatesSize(uintptr_t handle, size_t *nbytes);
int cudnnSetDropoutDescriptor(uintptr_t descriptor, uintptr_t handle, float ratio,
                              uintptr_t states, size_t states_bytes, unsigned long long seed);
int cudnnCreateRNNDescriptor(uintptr_t *descriptor);
int cudnnDestroyRNNDescriptor(uintptr_t descriptor);
int cudnnSetRNNDescriptor_v8(uintptr_t descriptor, int algorithm, int cell, int bias,
                             int direction, int input_mode, int type, int precision,
                             int math_type, int32_t input_size, int32_t hidden_size,
                             int32_t projection_size, int32_t layers, uintptr_t dropout,
                             uint32_t flags);
int cudnnCreateRNNDataDescriptor(uintptr_t *descriptor);
int cudnnDestroyRNNDataDescriptor(uintptr_t descriptor);
int cudnnSetRNNDataDescriptor(uintptr_t descriptor, int type, int layout, int max_length,
                              int batch, int vector, const int *lengths, void *fill);
int cudnnGetRNNTempSpaceSizes(uintptr_t handle, uintptr_t rnn, int mode, uintptr_t x_descriptor,
                              size_t *workspace_bytes, size_t *reserve_bytes);
int cudnnGetRNNWeightSpaceSize(uintptr_t handle, uintptr_t rnn, size_t *nbytes);
int cudnnGetRNNWeightParams(uintptr_t handle, uintptr_t rnn, int32_t layer, size_t weight_bytes,
                            uintptr_t weights, int32_t linear_layer, uintptr_t matrix_descriptor,
                            uintptr_t *matrix, uintptr_t bias_descriptor, uintptr_t *bias);
int cudnnRNNForward(uintptr_t handle, uintptr_t rnn, int mode, uintptr_t device_lengths,
                    uintptr_t x_descriptor, uintptr_t x, uintptr_t y_descriptor, uintptr_t y,
                    uintptr_t h_descriptor, uintptr_t hx, uintptr_t hy,
                    uintptr_t c_descriptor, uintptr_t cx, uintptr_t cy,
                    size_t weight_bytes, uintptr_t weights,
                    size_t workspace_bytes, uintptr_t workspace,
                    size_t reserve_bytes, uintptr_t reserve);
int cudnnRNNBackwardData_v8(
    uintptr_t handle, uintptr_t rnn, uintptr_t device_lengths,
    uintptr_t y_descriptor, uintptr_t y, uintptr_t gy, uintptr_t x_descriptor, uintptr_t gx,
    uintptr_t h_descriptor, uintptr_t hx, uintptr_t ghy, uintptr_t ghx,
    uintptr_t c_descriptor, uintptr_t cx, uintptr_t gcy, uintptr_t gcx,
    size_t weight_bytes, uintptr_t weights, size_t workspace_bytes, uintptr_t workspace,
    size_t reserve_bytes, uintptr_t reserve);
int cudnnRNNBackwardWeights_v8(
    uintptr_t handle, uintptr_t rnn, int mode, uintptr_t device_lengths,
    uintptr_t x_descriptor, uintptr_t x, uintptr_t h_descriptor, uintptr_t hx,
    uintptr_t y_descriptor, uintptr_t y, size_t weight_bytes, uintptr_t gw,
    size_t workspace_bytes, uintptr_t workspace, size_t reserve_bytes, uintptr_t reserve);
"""

DECLARATIONS = _GENERAL + _CONVOLUTION + _GRAPH + _LAYERS + _NORMALIZATION + _RECURRENT
