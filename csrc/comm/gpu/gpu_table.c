/* gpu_table.c - the transports over NCCL and over torch's process group. */
#include "comm/gpu/gpu.h"

ZS_GPU_TABLE(zs_nccl_ops, "nccl", gpu);
ZS_GPU_TABLE(zs_c10d_gpu_ops, "c10d_gpu", gpu);
