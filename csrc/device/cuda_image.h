/* cuda_image.h - the compiled kernels that lie in this library.
 *
 * They are bytes (a "fat binary": code for several GPUs, and PTX for later ones), put there by the assembler,
 * so the rest builds and links without CUDA; a build without CUDA has no image and reports that.
 */
#ifndef ZS_CUDA_IMAGE_H
#define ZS_CUDA_IMAGE_H

#include <stddef.h>

/* The image, for cuLibraryLoadData; NULL where this build has none. */
const void *zs_cuda_image(void);

/* Its length in bytes. */
size_t zs_cuda_image_bytes(void);

/* Its targets, as "sm_80 sm_90 compute_80"; "" without an image. */
const char *zs_cuda_image_targets(void);

/* The CUDA version of the nvcc that made it, 13000 is 13.0; 0 without one. A driver of an earlier major version
 * cannot load it. */
int zs_cuda_image_version(void);

#endif
