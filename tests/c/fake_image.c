/* fake_image.c - the image of the kernels, for programs that link its loader but not cuda_image.c.
 *
 * The fake of libcuda brings its own kernels, by their names, so the image only has to begin as one does. NO_IMAGE in
 * the environment: there is none, as in a build without nvcc.
 */
#include "device/cuda_image.h"

#include <stdint.h>
#include <stdlib.h>

static const uint64_t image[2] = {0xba55ed50u, 0};

const void *zs_cuda_image(void)
{
    return getenv("NO_IMAGE") == NULL ? image : NULL;
}

size_t zs_cuda_image_bytes(void)
{
    return sizeof image;
}

const char *zs_cuda_image_targets(void)
{
    return "sm_90";
}

int zs_cuda_image_version(void)
{
    return 13000;
}
