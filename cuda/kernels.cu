/* kernels.cu - all kernels, in one image.
 *
 * One image is loaded once and found by names, zs_<work>_<dtype>; cuda_kernels.c launches them.
 */
#include "cast.cuh"
#include "compact.cuh"
#include "constants.cuh"
#include "norm.cuh"
#include "sum.cuh"
#include "update.cuh"
#include "wire.cuh"
